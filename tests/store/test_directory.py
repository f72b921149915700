"""A run's directory: whose it is, and when another run may have it."""

import errno
import fcntl
import gc
import json
import os
import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import stronghold
from stronghold.engine import engine_of
from stronghold.errors import StoreError
from stronghold.store.directory import Directory, Inventory, UnitRecord, check_free, check_same


def layers(width=8, count=3):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def start(path, **model):
    return stronghold.offload(layers(**model), store=path, window=1, device="cpu")


def model_paths(model):
    return engine_of(model).store.paths


def record(name="0", shapes=((2, 3),)):
    return UnitRecord(file=f"layer-{name}.bin", name=name, dtype="float32", shapes=[list(s) for s in shapes])


def test_a_manifest_comes_back(tmp_path):
    directory = Directory([tmp_path / "a"])
    unit = record()
    manifest = Inventory(units=[unit, record("1")])
    assert directory.read() is None
    directory.write(manifest)
    assert directory.read() == manifest
    assert not (tmp_path / "a" / "store.partial").exists()


def test_what_a_full_disk_left_of_a_first_inventory_is_not_another_s(tmp_path, monkeypatch):
    directory = Directory([tmp_path / "a"])

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            directory.write(Inventory(units=[record()]))
    directory.release()
    assert Directory([tmp_path / "a"]).read() is None


def test_a_file_system_without_locks_is_told_as_that(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(StoreError, match=r"a file system with locks \(got No locks available at .*another one"):
        Directory([tmp_path / "a"])


def test_a_directory_has_one_user_at_a_time(tmp_path):
    first = Directory([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(StoreError, match="in use by another model of this process"):
        Directory([tmp_path / "c", tmp_path / "b"])
    first.release()
    Directory([tmp_path / "c", tmp_path / "b"]).release()


def test_other_people_s_files_are_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match=r"must be new or empty, or hold a run .*thesis\.tex"):
        start(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert sorted(p.name for p in tmp_path.iterdir()) in (["thesis.tex"], ["lock", "thesis.tex"])


def test_what_another_number_of_processes_had_there_is_told_of(tmp_path):
    (tmp_path / "process-0").mkdir()
    with pytest.raises(StoreError, match=r"a run in several processes had there.*\(process-0\).*remove that directory"):
        start(tmp_path)
    assert (tmp_path / "process-0").is_dir()


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "cannot be read"), ("{}", "cannot be read"), ('{"format": 99, "units": []}', "format 99, and this version")],
)
def test_a_manifest_that_is_not_ours_is_refused(tmp_path, content, message):
    (tmp_path / "store.json").write_text(content)
    with pytest.raises(StoreError, match=message):
        start(tmp_path)
    assert (tmp_path / "store.json").read_text() == content


def test_another_model_is_refused_with_the_first_difference():
    held = Inventory(units=[record("0"), record("1")])
    check_same(held, [record("0"), record("1")], "here")
    with pytest.raises(StoreError, match=r"it has 1 of float32 with shapes \[\[2, 3\]\], this model 1 .*\[\[3, 2\]\]"):
        check_same(held, [record("0"), record("1", [(3, 2)])], "here")
    with pytest.raises(StoreError, match="it has 2 units, this model 3 units"):
        check_same(held, [record("0"), record("1"), record("2")], "here")


def test_a_directory_of_another_model_is_refused_and_one_of_the_same_begun_anew(tmp_path):
    first = start(tmp_path / "s")
    engine_of(first).store._finalizer.detach()  # as if it had been killed
    engine_of(first).store._directory.release()
    content = {p.name: p.read_bytes() for p in (tmp_path / "s").iterdir()}
    with pytest.raises(StoreError, match="belongs to another model"):
        start(tmp_path / "s", width=9)
    assert {p.name: p.read_bytes() for p in (tmp_path / "s").iterdir() if p.name != "lock"} == {
        name: data for name, data in content.items() if name != "lock"
    }
    torch.manual_seed(3)
    again = start(tmp_path / "s")
    torch.manual_seed(3)
    for parameter, expected in zip(again.parameters(), layers().parameters(), strict=True):
        assert torch.equal(parameter, expected)


def test_several_directories_share_the_bytes(tmp_path):
    width = 1200  # 5.8 MB of weights a layer and twice that of moments: five stripes of 4 MiB

    def train(**options):
        model = stronghold.offload(layers(width=width, count=5), window=2, device="cpu", **options)
        optimizer = stronghold.AdamW(model.parameters(), update="in_backward")
        for step in range(3):
            model(torch.full((2, width), 0.01 * step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    torch.manual_seed(0)
    model = train(store=[tmp_path / "a", tmp_path / "b"])
    sizes = {path: [os.path.getsize(file) for file in sorted(path.glob("layer-*.bin"))] for path in model_paths(model)}
    assert [len(found) for found in sizes.values()] == [5, 5]
    assert all(size >= 2 * 4 * 2**20 for found in sizes.values() for size in found), "every unit is on both"
    totals = [sum(found) for found in sizes.values()]
    assert abs(totals[0] - totals[1]) <= 4 * 2**20, "units take turns in which directory has the first stripe"
    engine_of(model).store.verify()
    torch.manual_seed(0)
    in_memory = train(store="ram")
    for striped, expected in zip(model.parameters(), in_memory.parameters(), strict=True):
        assert torch.equal(striped, expected)
    manifest = json.loads((tmp_path / "a" / "store.json").read_text())
    assert len(manifest["units"]) == 5
    assert not (tmp_path / "b" / "store.json").exists()


def test_files_go_with_the_model_and_directories_with_them_if_they_were_made_for_it(tmp_path):
    (tmp_path / "mine").mkdir()
    model = stronghold.offload(layers(), store=[tmp_path / "mine", tmp_path / "new" / "made"], window=1, device="cpu")
    kept = model[1].weight.data
    expected = kept.clone()
    assert (tmp_path / "new" / "made").exists()
    del model
    gc.collect()
    assert list((tmp_path / "mine").iterdir()) == []
    assert not (tmp_path / "new").exists()
    assert torch.equal(kept, expected), "what somebody still holds stays readable"


@pytest.mark.parametrize("made_again", (False, True))
def test_a_model_that_goes_late_leaves_the_directory_to_another_that_is_there_by_then(tmp_path, made_again):
    """The user has removed the first one's directory, or what was in it, and has begun anew."""
    store = tmp_path / "store"
    first = start(store)
    if made_again:
        shutil.rmtree(store)
    else:
        for path in store.iterdir():
            path.unlink()
    second = start(store)
    names = sorted(path.name for path in store.iterdir())
    del first
    gc.collect()
    assert sorted(path.name for path in store.iterdir()) == names
    with pytest.raises(StoreError, match="is in use by another model of this process"):
        start(store)
    x = torch.ones(2, 8)
    second(x).sum().backward()
    stronghold.close(second)
    assert not made_again or not store.exists()


def test_a_directory_that_somebody_has_removed_is_no_error_when_the_model_goes(tmp_path):
    model = start(tmp_path / "s")
    shutil.rmtree(tmp_path / "s")
    stronghold.close(model)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("store", ["", [], ["/a", "/a"], 3, None])
def test_what_is_no_store_is_refused(store):
    with pytest.raises(ValueError, match="store must"):
        stronghold.offload(layers(), store=store, device="cpu")


def test_a_store_without_threads_leaves_nothing_and_the_directory_to_others(tmp_path, monkeypatch):
    def refused(**settings):
        raise OSError("no more threads")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="no more threads"):
        patched.setattr("stronghold.store.disk.Disk", refused)
        start(tmp_path / "s")
    assert not (tmp_path / "s").exists()
    start(tmp_path / "s")


def test_directories_on_one_drive_need_the_space_of_all(tmp_path, monkeypatch):
    paths = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    for path in paths:
        path.mkdir()
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=2 * 2**20))
    check_free(paths, 2 * 2**20, "it")
    told = r"it takes 2\.50 MiB at .*/a, .*/b, .*/c, where 2\.00 MiB are free; free 512 KiB more"
    with pytest.raises(StoreError, match=told):
        check_free(paths, 5 * 2**19, "it")


def test_directories_on_several_drives_need_their_shares(tmp_path, monkeypatch):
    paths = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    for path in paths:
        path.mkdir()
    stat, real, free = os.stat, shutil.disk_usage, {"a": 2 * 2**20, "b": 10 * 2**20, "c": 2 * 2**20}
    monkeypatch.setattr(os, "stat", lambda path, **how: on_drive(stat(path, **how), path, paths[1]))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=free[path.name]))
    check_free(paths, 3 * 2**20, "it")
    told = r"it takes 4\.00 MiB at .*/a, .*/c, where 2\.00 MiB are free; free 2\.00 MiB more"
    with pytest.raises(StoreError, match=told):
        check_free(paths, 6 * 2**20, "it")


def on_drive(found, path, other):
    return found if path != other else os.stat_result([*found[:2], found.st_dev + 1, *found[3:10]])


def test_a_store_stays_where_it_is_when_the_process_goes_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "begun").mkdir()
    (tmp_path / "gone to").mkdir()
    monkeypatch.chdir(tmp_path / "begun")
    model = start("store")
    monkeypatch.chdir(tmp_path / "gone to")
    optimizer = stronghold.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    stronghold.checkpoint.save(tmp_path / "begun" / "store", model, optimizer)
    stronghold.close(model)
    assert (tmp_path / "begun" / "store" / "manifest.json").exists()
    assert not any((tmp_path / "gone to").iterdir())


def test_a_colon_in_a_name_is_a_part_of_it(tmp_path):
    store = tmp_path / "run-2025-11-27T12:30:05"
    plain, model = layers(), start(str(store))
    plain.load_state_dict(model.state_dict())
    assert [p.name for p in tmp_path.iterdir()] == [store.name]
    assert stronghold.checkpoint.save(str(store), model, stronghold.AdamW(model.parameters())) == store
    stronghold.close(model)
    again = stronghold.offload(layers(), store=str(store), weights=str(store), window=1, device="cpu")
    stronghold.checkpoint.load(store, again, stronghold.AdamW(again.parameters()))
    assert all(map(torch.equal, again.parameters(), plain.parameters()))
    assert [p.name for p in tmp_path.iterdir()] == [store.name]


def test_a_lock_that_was_given_back_is_free_though_a_child_of_fork_lives(tmp_path):
    """A worker of a DataLoader has its parent's descriptors."""
    store = tmp_path / "store"
    plain, model = layers(), start(store)
    plain.load_state_dict(model.state_dict())
    optimizer, expected = stronghold.AdamW(model.parameters()), torch.optim.AdamW(plain.parameters())
    data = DataLoader(torch.randn(2, 8), num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    batches = iter(data)
    batch = next(batches)
    for one, its in ((model, optimizer), (plain, expected)):
        one(batch).sum().backward()
        its.step()
    stronghold.checkpoint.save(store, model, optimizer)
    stronghold.close(model)
    loaded = stronghold.offload(layers(), window=1, device="cpu")
    stronghold.checkpoint.load(store, loaded, stronghold.AdamW(loaded.parameters()))
    again = stronghold.offload(layers(), store=store, weights=store, window=1, device="cpu")
    stronghold.checkpoint.load(store, again, stronghold.AdamW(again.parameters()))
    for found in (loaded, again):
        torch.testing.assert_close(dict(found.state_dict()), dict(plain.state_dict()))
    assert batches._workers[0].is_alive()
