"""A run's directory on disk, saved in place: it outlives the run, is reopened to the bit, and is never half a one."""

from __future__ import annotations

import functools
import gc
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import stronghold
from stronghold.checkpoint.in_place import check_space_beside
from stronghold.engine import engine_of
from stronghold.errors import CheckpointError, CorruptionError, StoreError
from stronghold.formats.manifest import NAME, UnitFileEntry, read_manifest
from stronghold.formats.reader import verify
from stronghold.layout import PAGE_BYTES
from stronghold.store.unit_file import UnitFile
from tests.checkpoint.training import Training
from tests.crossed import crossed
from tests.formats import forged
from tests.reference import CASES, differences, snapshot
from tests.small_ring import RING_BYTES, make_the_ring_small

ROOT = Path(__file__).parents[2]
CASE = CASES["gpt"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FORMATS = crossed(("fp32", "bf16"), ("fp32", "8bit"), ("deferred", "in_backward"), ("one",), together=1)
SPLITS = {
    "one": {},
    "two": {},
    "split": {"host_memory": RING_BYTES + 330_000},
    "weights": {"host_memory": RING_BYTES + 150_000},
    "resident": {"resident": 2},
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has units of a few pages striped over several directories, and updated in several chunks, as large ones are."""
    make_the_ring_small(monkeypatch)
    monkeypatch.setattr("stronghold.store.unit_file.PIECE_BYTES", 4096)


def directories(tmp_path: Path, split: str) -> Any:
    return [tmp_path / "store", tmp_path / "other"] if split == "two" else tmp_path / "store"


def files(directory: Path) -> dict[str, bytes]:
    """Returns the contents of all files but the lock, which tells who was here last."""
    return {p.name: p.read_bytes() for p in sorted(directory.iterdir()) if p.name != "lock"}


def sealed(path: Any, steps: int = 2, **settings: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Trains and saves in place; returns what the run ended with. Nobody has the directory open any more."""
    training = Training(CASE.model(), store=path, clip=None, **{"window": 2, **settings})
    torch.manual_seed(3)
    training.steps(CASE.batches(5)[:steps])
    final = snapshot(training.model, training.optimizer)
    training.save(path[0] if isinstance(path, list) else path, extra={"position": steps})
    del training
    gc.collect()
    return final


def reopened(path: Any, *, model: nn.Module | None = None, **settings: Any) -> Training:
    first = path[0] if isinstance(path, list) else path
    if model is None:
        with torch.device("meta"):
            model = CASE.model(seed=1)
        model = model if not any(b.is_meta for b in model.buffers()) else CASE.model(seed=1)
    return Training(model, store=path, weights=first, clip=None, **{"window": 2, **settings})


@functools.cache  # several tests go on from the same
def without_stop(**settings: Any) -> tuple[list[float], Any]:
    training = Training(CASE.model(), window=2, clip=None, **settings)
    torch.manual_seed(3)
    losses = training.steps(CASE.batches(5))
    return losses, snapshot(training.model, training.optimizer)


@pytest.mark.parametrize(("split", "formats"), crossed(SPLITS, (("fp32", "fp32"), ("bf16", "8bit")), together=1))
def test_the_room_that_is_asked_for_beforehand_is_what_the_tensors_beside_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str, formats: tuple[str, str]
) -> None:
    """Counted by safetensors, in the files that are written."""
    dtype, states = formats
    path = directories(tmp_path, split)
    training = Training(
        CASE.model(), store=path, clip=None, window=2, dtype=DTYPES[dtype], states=states, **SPLITS[split]
    )
    real, free = shutil.disk_usage, [0]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=free[0]))
    with pytest.raises(StoreError, match="beside the units' files") as told:  # before there is any state
        check_space_beside(training.model, training.optimizer)
    free[0] = 2**40
    training.steps(CASE.batches(5)[:1])
    training.save(tmp_path / "store", extra={})
    written = [load_file(path) for path in (tmp_path / "store").glob("*.safetensors")]
    least = sum(tensor.nbytes for file in written for tensor in file.values())
    free[0] = least - 1
    with pytest.raises(StoreError) as again:
        check_space_beside(training.model, training.optimizer)
    assert str(again.value).partition(", where")[0] == str(told.value).partition(", where")[0]
    free[0] = least
    check_space_beside(training.model, training.optimizer)


@pytest.mark.parametrize(
    ("dtype", "states", "update", "split"),
    [*FORMATS, *(("bf16", "8bit", "in_backward", s) for s in SPLITS if s != "one")],
)
def test_what_follows_a_reopening_is_what_would_have_followed(
    tmp_path: Path, dtype: str, states: str, update: str, split: str
) -> None:
    formats = {"dtype": DTYPES[dtype], "states": states, "update": update}
    losses, final = without_stop(**formats)
    path = directories(tmp_path, split)
    training = Training(CASE.model(), store=path, clip=None, window=2, **formats, **SPLITS[split])
    torch.manual_seed(3)
    before = training.steps(CASE.batches(5)[:2])
    first = path[0] if isinstance(path, list) else path
    training.save(first, extra={"position": 2})
    del training
    gc.collect()
    kept = files(first)
    torch.manual_seed(99)
    training = reopened(path, **formats, **SPLITS[split])
    assert training.load(first) == {"position": 2}
    assert files(first) == kept, "nothing was copied, nothing written"
    assert [*before, *training.steps(CASE.batches(5)[2:])] == losses
    assert differences(snapshot(training.model, training.optimizer), final) == []
    engine_of(training.model).store.verify()


def test_the_splits_are_what_they_are_meant_to_be(tmp_path: Path) -> None:
    kinds = {}
    for split, settings in SPLITS.items():
        path = directories(tmp_path / split, split)
        sealed(path, steps=1, dtype=torch.bfloat16, **settings)
        manifest = read_manifest(path[0] if isinstance(path, list) else path)
        layers = {name: p for name, p in manifest.parameters.items() if "weight" in name}
        kinds[split] = {(p.file.endswith(".bin"), p.beside is not None) for p in layers.values()}
    assert kinds["split"] | kinds["weights"] >= {(True, True), (True, False), (False, False)}, kinds
    for path in ((tmp_path / "two" / "store"), (tmp_path / "two" / "other")):
        assert all(file.stat().st_size > 4096 for file in path.glob("layer-*.bin")), "every layer is on both"


def in_a_process(code: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    begin = "import os, signal, sys, torch, stronghold\nfrom tests.checkpoint.test_in_place import *\n"
    command = [sys.executable, "-c", begin + textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


def test_a_new_process_goes_on(tmp_path: Path) -> None:
    losses, _ = without_stop()
    sealed(tmp_path / "store")
    code = """
    training = reopened(Path(sys.argv[1]))
    training.load(sys.argv[1])
    print(json.dumps(training.steps(CASE.batches(5)[2:])))
    """
    done = in_a_process(code, tmp_path / "store")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == losses[2:]
    assert not list((tmp_path / "store").iterdir()), "memory again, which went with the run"


@pytest.mark.parametrize(
    "moment", [pytest.param("after a step", marks=pytest.mark.long), "before the manifest", "in the first write"]
)
def test_a_run_that_is_killed_after_the_first_change_leaves_no_checkpoint(tmp_path: Path, moment: str) -> None:
    sealed(tmp_path / "store")
    code = """
    import stronghold.formats.manifest as manifests, stronghold.store.directory as directory
    from stronghold.native import Disk
    path, moment = Path(sys.argv[1]), sys.argv[2]
    kill = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    training = reopened(path)
    training.load(path)
    assert (path / NAME).exists()
    if moment == "in the first write":
        Disk.write = kill
    training.steps(CASE.batches(5)[2:3])
    training.optimizer.wait()  # before its updates begin nothing has changed
    if moment == "before the manifest":
        directory.put_partial = kill
        training.save(path)
    kill()
    """
    done = in_a_process(code, tmp_path / "store", moment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "store" / NAME).exists()
    before = files(tmp_path / "store")
    with pytest.raises(StoreError, match=r"reopened where a checkpoint was saved in place .* has changed since"):
        reopened(tmp_path / "store")
    assert files(tmp_path / "store") == before
    again = Training(CASE.model(), store=tmp_path / "store", window=2)  # as over any killed run
    again.steps(CASE.batches(1))
    assert not [name for name in files(tmp_path / "store") if "safetensors" in name or "manifest" in name]


@pytest.mark.parametrize("moment", [pytest.param("open", marks=pytest.mark.long), "loaded"])
def test_a_run_that_is_killed_before_it_changes_anything_leaves_the_checkpoint(tmp_path: Path, moment: str) -> None:
    losses, _ = without_stop()
    sealed(tmp_path / "store")
    code = """
    training = reopened(Path(sys.argv[1]))
    if sys.argv[2] == "loaded":
        training.load(sys.argv[1])
        with torch.no_grad():
            training.model(**CASE.batches(1)[0])
    os.kill(os.getpid(), signal.SIGKILL)
    """
    done = in_a_process(code, tmp_path / "store", moment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    training = reopened(tmp_path / "store")
    training.load(tmp_path / "store")
    assert training.steps(CASE.batches(5)[2:]) == losses[2:]


def damage(directory: Path, what: str) -> tuple[Path, str]:
    """Damages a file of a checkpoint; returns it, and its unit."""
    manifest, generator = read_manifest(directory), random.Random(what)
    kind = UnitFileEntry if "unit" in what or "padding" in what else object
    names = [name for name, entry in manifest.files.items() if isinstance(entry, kind)]
    name = next(n for n in names if n.endswith("safetensors")) if kind is object else names[2]
    path, entry = directory / name, manifest.files[name]
    if what.startswith("removed"):
        path.unlink()
    elif what.startswith("truncated"):
        os.truncate(path, path.stat().st_size - 5000 if kind is not object else path.stat().st_size - 1)
    else:
        offset = generator.randrange(path.stat().st_size)
        if isinstance(entry, UnitFileEntry):
            tensors = sorted(entry.tensors.values(), key=lambda tensor: tensor.offset)
            length = torch.Size(tensors[0].shape).numel() * 4
            offset = tensors[0].offset + (length if what == "padding" else generator.randrange(length))
        with path.open("r+b") as file:
            file.seek(offset)
            octet = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([octet ^ 4]))
    return path, entry.unit


@pytest.mark.parametrize(
    ("what", "split"),
    [
        ("flipped in a unit", "one"),
        ("flipped in a unit", "split"),
        *crossed(
            ("padding", "truncated unit", "removed unit", "flipped", "truncated", "removed"),
            ("split", "one"),
            together=1,
        ),
    ],
)
def test_damage_is_found_when_it_is_opened_and_named_and_left_alone(tmp_path: Path, what: str, split: str) -> None:
    sealed(tmp_path / "store", **SPLITS[split])
    path, unit = damage(tmp_path / "store", what)
    before = files(tmp_path / "store")
    with pytest.raises((CheckpointError, CorruptionError), match=re.escape(f"file of {unit}")) as caught:
        reopened(tmp_path / "store", **SPLITS[split])
    assert str(path) in str(caught.value)
    assert files(tmp_path / "store") == before
    if what != "padding":  # of which others have no use
        with pytest.raises((CheckpointError, CorruptionError), match=re.escape(str(path))):
            verify(read_manifest(tmp_path / "store"))
        with pytest.raises((CheckpointError, CorruptionError), match=re.escape(str(path))):
            Training(CASE.model(), window=2).load(tmp_path / "store")


def test_a_kept_run_is_not_overwritten(tmp_path: Path) -> None:
    sealed(tmp_path / "store")
    before = files(tmp_path / "store")
    with pytest.raises(
        StoreError, match=r"holds a run after step 2, which this .* weights='.*store' .*, or remove that"
    ):
        Training(CASE.model(), store=tmp_path / "store")
    with pytest.raises(StoreError, match=r"with a run after step 2, belongs to another model"):
        reopened(tmp_path / "store", model=CASES["llama"].model())
    with pytest.raises(StoreError, match=r"with a run after step 2, belongs to another model"):
        Training(CASES["llama"].model(), store=tmp_path / "store")
    (tmp_path / "store" / NAME).write_bytes(before[NAME][:-9])
    with pytest.raises(StoreError, match="manifest cannot be read"):
        Training(CASE.model(), store=tmp_path / "store")
    (tmp_path / "store" / NAME).write_bytes(before[NAME])
    assert files(tmp_path / "store") == before
    reopened(tmp_path / "store").load(tmp_path / "store")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"dtype": torch.bfloat16}),
        pytest.param({"dtype": torch.bfloat16}, {}, marks=pytest.mark.long),
        ({}, {"states": "8bit"}),
        pytest.param({"states": "8bit"}, {}, marks=pytest.mark.long),
        pytest.param({}, SPLITS["split"], marks=pytest.mark.long),
        (SPLITS["split"], {}),
        ({}, {"resident": 2}),
        pytest.param({"resident": 2}, {}, marks=pytest.mark.long),
    ],
)
def test_another_placement_or_format_is_refused_with_the_remedy_and_nothing_changes(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    expected = sealed(tmp_path / "store", **before)
    kept = files(tmp_path / "store")
    with pytest.raises((StoreError, CheckpointError), match=r"into a store in another directory|do not go into eight"):
        reopened(tmp_path / "store", **after).load(tmp_path / "store")
    gc.collect()
    assert files(tmp_path / "store") == kept
    if "states" not in after:
        other = Training(CASE.model(seed=1), store=tmp_path / "new", window=1, **after)  # the remedy
        other.load(tmp_path / "store")
        if not {"dtype", "states"} & {*before, *after}:
            assert differences(snapshot(other.model, other.optimizer), expected) == []


def test_other_numbers_of_directories_are_refused(tmp_path: Path) -> None:
    one, two = tmp_path / "store", tmp_path / "other"
    sealed([one, two])
    kept = files(one), files(two)
    for path in (one, [one, tmp_path / "third"], [one, two, tmp_path / "third"]):
        with pytest.raises((StoreError, CheckpointError), match="into a store in another directory"):
            reopened(path)
        gc.collect()
    with pytest.raises(StoreError, match="must be new or empty"):
        Training(CASE.model(), store=[two, one])
    assert (files(one), files(two)) == kept
    assert not (tmp_path / "third").exists()


def test_nothing_is_written_before_the_optimizer_has_its_states(tmp_path: Path) -> None:
    sealed(tmp_path / "store")
    kept = files(tmp_path / "store")
    training = reopened(tmp_path / "store")
    for attempt in (
        lambda: training.steps(CASE.batches(1)),
        lambda: next(training.model.layers.parameters()).data.zero_(),
        lambda: training.save(tmp_path / "store"),
        lambda: training.optimizer.load_state_dict(training.optimizer.state_dict()),
    ):
        with pytest.raises(StoreError, match=r"reopened after step 2.*call stronghold\.checkpoint\.load"):
            attempt()
            next(training.model.layers.parameters()).add_(1)
    assert files(tmp_path / "store") == kept


def test_who_looks_at_a_weight_is_told_that_the_checkpoint_ends(tmp_path: Path) -> None:
    training = Training(CASE.model(), store=tmp_path / "store", window=2)
    training.steps(CASE.batches(1))
    training.save(tmp_path / "store")
    training.model(**CASE.batches(1)[0]).loss.item()
    stronghold.report(training.model)
    stronghold.verify(training.model)
    print(training.model.layers)
    assert (tmp_path / "store" / NAME).exists()
    with pytest.warns(RuntimeWarning, match=r"layers\.0 may be written .*store is no checkpoint any more"):
        training.model.state_dict()
    assert not (tmp_path / "store" / NAME).exists()


def test_held_weights_are_not_saved_in_place(tmp_path: Path) -> None:
    training = Training(CASE.model(), store=tmp_path / "store", window=2)
    held = next(training.model.layers.parameters()).data
    with pytest.raises(StoreError, match=r"nobody may hold .* \(got one over layers\.0"):
        training.save(tmp_path / "store")
    assert not [name for name in files(tmp_path / "store") if "manifest" in name or "partial" in name]
    del held
    training.save(tmp_path / "store")


def test_writes_of_every_kind_end_the_checkpoint(tmp_path: Path) -> None:
    training = Training(CASE.model(), store=tmp_path / "store", window=2, dtype=torch.bfloat16)
    training.steps(CASE.batches(1))
    states = training.optimizer.state_dict()
    saved = training.save(tmp_path / "plain")

    def write_root() -> None:
        training.model.embedding.weight.data.mul_(1.5)
        assert (tmp_path / "store" / NAME).exists(), "so far it is on the device alone"
        stronghold.save(training.model, tmp_path / "model")

    for number, change in enumerate(
        (
            lambda: training.steps(CASE.batches(1)),
            lambda: next(training.model.layers.parameters()).data.zero_(),
            lambda: nn.init.zeros_(next(training.model.layers.parameters())),
            lambda: training.optimizer.load_state_dict(states),
            lambda: training.load(saved),
            write_root,
        )
    ):
        training.save(tmp_path / "store", extra={"number": number})
        verify(read_manifest(tmp_path / "store"))
        with pytest.warns(RuntimeWarning, match="no checkpoint any more") if number else pytest.warns(match=""):
            change()
            if not number:
                pytest.importorskip("warnings").warn("none of ours", stacklevel=1)
        assert not (tmp_path / "store" / NAME).exists(), number
        stronghold.verify(training.model)


def test_a_store_whose_root_parameters_have_their_old_names_is_reopened_to_the_bit(tmp_path: Path) -> None:
    final = sealed(store := tmp_path / "store")

    def old(text: str) -> str:
        return re.sub(r"root-(\d{5})", r"edge-\1", text)

    for path in list(store.iterdir()):
        path.rename(store / old(path.name))
    (store / "store.json").write_text(old((store / "store.json").read_text()))
    forged.forge(store, lambda content: json.loads(old(json.dumps(content))))
    assert any(path.name.startswith("edge-") for path in store.iterdir())
    training = reopened(store)
    assert training.load(store) == {"position": 2}
    assert not differences(snapshot(training.model, training.optimizer), final)
    stronghold.verify(training.model)


@pytest.mark.parametrize("file", ["root-00001.safetensors.partial", "manifest.json.partial"])
def test_saving_again_keeps_what_was_kept_until_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    training = Training(CASE.model(), store=tmp_path / "store", window=2)
    training.steps(CASE.batches(1))
    training.save(tmp_path / "store", extra={"a": 1})
    kept = files(tmp_path / "store")
    sync = os.fsync

    def full(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(file):
            raise OSError(28, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            training.save(tmp_path / "store", extra={"a": 2})
    assert files(tmp_path / "store") == kept
    training.save(tmp_path / "store", extra={"a": 3})
    assert read_manifest(tmp_path / "store").extra == {"a": 3}
    assert training.load(tmp_path / "store") == {"a": 3}, "back to where it is"


@pytest.mark.parametrize(
    ("form", "split"),
    crossed((("fp32", "fp32"), ("bf16", "8bit"), ("bf16", "fp32")), ("one", "two", "split"), together=1),
)
def test_it_is_a_checkpoint_for_every_other_store(tmp_path: Path, form: tuple[str, str], split: str) -> None:
    dtype, states = form
    path = directories(tmp_path, split)
    first = path[0] if isinstance(path, list) else path
    expected = sealed(path, dtype=DTYPES[dtype], states=states, **SPLITS[split])
    kept = files(first)
    for number, settings in enumerate(({"store": "ram"}, {"store": tmp_path / "new", "window": 3}, {"resident": 1})):
        other = Training(CASE.model(seed=number), dtype=DTYPES[dtype], states=states, clip=None, **settings)
        assert other.load(first) == {"position": 2}
        assert differences(snapshot(other.model, other.optimizer), expected) == []
    assert files(first) == kept
    shutil.copytree(first, tmp_path / "run" / "step-000002")
    manifest, skipped = stronghold.checkpoint.newest(tmp_path / "run")
    assert manifest is not None and manifest.step == 2 and not skipped


def test_one_process_at_a_time_has_it(tmp_path: Path) -> None:
    sealed(tmp_path / "store")
    training = reopened(tmp_path / "store")
    code = """
    for attempt in (lambda: reopened(Path(sys.argv[1])), lambda: Training(CASE.model()).load(sys.argv[1])):
        try:
            attempt()
        except stronghold.errors.StoreError as error:
            print(error)
    """
    done = in_a_process(code, tmp_path / "store")
    assert done.stdout.count(f"in use by another run (process {os.getpid()})") == 2, done.stdout + done.stderr
    training.load(tmp_path / "store")


def test_moments_that_were_dropped_begin_at_zero_again(tmp_path: Path) -> None:
    found = []
    for store in ("ram", tmp_path / "store"):
        training = Training(CASE.model(), store=store, window=2, clip=None)
        training.steps(CASE.batches(2))
        training.optimizer.state.clear()
        path = training.save(tmp_path / "store" if store != "ram" else tmp_path / "saved")
        del training
        gc.collect()
        training = reopened(path) if store != "ram" else Training(CASE.model(), window=2, clip=None)
        training.load(path)
        training.steps(CASE.batches(1, seed=7))
        found.append(snapshot(training.model, training.optimizer))
    assert differences(*found) == []


def test_a_relative_path_and_another_name_of_the_same_directory_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, _ = without_stop()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "store")
    sealed([Path("store"), Path("other")])
    verify(read_manifest("store"))
    training = Training(
        CASE.model(), store=[Path("store"), Path("other")], weights=tmp_path / "link", clip=None, window=2
    )
    training.load("link")
    assert training.steps(CASE.batches(5)[2:]) == losses[2:]


@pytest.mark.parametrize("tensor", ["weight", "exp_avg_sq"])
def test_what_is_altered_after_the_reopening_is_found_as_well(tmp_path: Path, tensor: str) -> None:
    sealed(tmp_path / "store")
    training = reopened(tmp_path / "store")
    training.load(tmp_path / "store")
    manifest = read_manifest(tmp_path / "store")
    entry = manifest.files["layer-00003.bin"]
    offset = next(e.offset for name, e in entry.tensors.items() if name.endswith(tensor))
    with (tmp_path / "store" / "layer-00003.bin").open("r+b") as file:
        file.seek(offset)
        file.write(b"\x77")
    with pytest.raises(CorruptionError, match=rf"{re.escape(entry.unit)}.*layer-00003\.bin"):
        stronghold.verify(training.model)
    with pytest.raises(CorruptionError, match=r"layer-00003\.bin"):
        training.steps(CASE.batches(2))
        training.optimizer.wait()


def test_space_that_is_reserved_is_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed(tmp_path / "store")
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=0))
    reopened(tmp_path / "store").load(tmp_path / "store")
    with pytest.raises(StoreError, match="the model's weights takes"):
        Training(CASE.model(), store=tmp_path / "new")


def test_a_new_optimizer_begins_at_zero_where_an_earlier_one_has_left_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of these small layers 8-bit moments take more than those in fp32, with which the file is kept."""
    path, batches, left = tmp_path / "store", CASE.batches(4), list[int]()
    take = UnitFile.take

    def taken(self: UnitFile, length_bytes: int, *, as_kept: bool = False, **more: Any) -> Any:
        part = take(self, length_bytes, as_kept=as_kept, **more)
        if not as_kept:
            begin = self.taken_bytes - -(-length_bytes // PAGE_BYTES) * PAGE_BYTES
            left.append(
                int(torch.frombuffer(self._memory, dtype=torch.uint8)[begin : self.taken_bytes].count_nonzero())
            )
        return part

    monkeypatch.setattr(UnitFile, "take", taken)
    training = Training(CASE.model(), store=path, window=2, clip=None, states="8bit")
    training.steps(batches[:2])
    training.save(path)
    training.optimize()
    training.steps(batches[2:3])
    training.save(path)
    del training
    gc.collect()
    training = reopened(path)
    training.load(path)
    training.optimize(states="8bit")
    training.steps(batches[3:])
    assert len(left) > 3 * len(engine_of(training.model).layers) and not any(left)
