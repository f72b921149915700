"""What goes wrong with a disk ends within seconds, in an error that names the file and the layer; nothing is a hang."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import textwrap
import time
from functools import partial

import pytest
import torch
from torch import nn

import stronghold
from stronghold.engine import engine_of
from stronghold.errors import CorruptionError, DiskError, StoreError
from stronghold.native import BufferedDiskWarning, Disk, Fault, UnreservedDiskWarning, disk_errors
from stronghold.store import disk as disk_module
from tests.reference import differences, snapshot
from tests.short_files import short_files


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(4)))


def step(model, optimizer, seed=0):
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed))
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def start(directory, *, update="deferred", **settings):
    model = stronghold.offload(build(), store=directory, window=2, device="cpu", **settings)
    return model, stronghold.AdamW(model.parameters(), lr=1e-2, update=update)


def test_files_that_may_not_be_as_long_as_a_layer_leave_nothing(tmp_path):
    with short_files(4096), pytest.raises(StoreError, match=r"File too large for .*layer-.*\(ulimit -f\)"):
        start(tmp_path / "store")
    step(*start(tmp_path / "store"))  # the limit is gone, and no file was in the way


@pytest.fixture
def faults(monkeypatch):
    """Lets the disks that are opened from now on go wrong."""
    wanted = []
    monkeypatch.setattr(disk_module, "Disk", partial(Disk, faults=wanted))
    return wanted


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("nth", [1, 7, 14])
def test_an_error_of_the_device_is_raised_with_file_and_layer(tmp_path, faults, kind, nth, update):
    faults.append(Fault(kind=kind, what="EIO", nth=nth, path_ends=".bin"))
    begin = time.monotonic()
    with pytest.raises(DiskError) as caught:
        model, optimizer = start(tmp_path / "store", update=update)
        for i in range(4):
            step(model, optimizer, i)
        optimizer.wait()
    assert caught.value.errno == errno.EIO
    assert caught.value.path.startswith(str(tmp_path / "store"))
    assert str(caught.value).startswith(("0", "1", "2", "3"))  # the layer's name
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("kind", ["read", "write"])
def test_short_transfers_and_interruptions_change_nothing(tmp_path, faults, kind):
    faults += [
        Fault(kind=kind, what="short", nth=3, times=5),
        Fault(kind=kind, what="EINTR", nth=20, times=3),
        Fault(kind=kind, what="delay", nth=30, delay_s=0.05),
    ]
    found = []
    for store in ("ram", tmp_path / "store"):
        model, optimizer = start(store)
        for i in range(4):
            step(model, optimizer, i)
        found.append(snapshot(model, optimizer))
    assert differences(*found) == []


def test_a_disk_that_fills_in_the_middle_of_a_step_says_so(tmp_path, faults):
    faults.append(Fault(kind="write", what="ENOSPC", nth=9))
    model, optimizer = start(tmp_path / "store")
    with pytest.raises(DiskError, match="the disk is full") as caught:
        for i in range(4):
            step(model, optimizer, i)
        optimizer.wait()
    assert caught.value.errno == errno.ENOSPC


def test_a_start_that_does_not_fit_is_refused_with_the_bytes_and_leaves_nothing(tmp_path, faults):
    faults.append(Fault(kind="reserve", what="ENOSPC", nth=3))
    with pytest.raises(DiskError, match="the disk is full"):
        start(tmp_path / "new" / "store")
    assert not (tmp_path / "new").exists()


def test_too_little_space_is_told_before_anything_is_written(tmp_path, monkeypatch):
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=1000))
    plain = build()
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    with pytest.raises(StoreError, match=r"takes .* KiB at .*, where 1000 B are free; free .* more"):
        stronghold.offload(plain, store=tmp_path / "store", window=2, device="cpu")
    assert not (tmp_path / "store").exists()
    assert all(torch.equal(tensor, before[name]) for name, tensor in plain.state_dict().items())
    monkeypatch.setattr(shutil, "disk_usage", real)
    model = stronghold.offload(build(), store=tmp_path / "store", window=2, device="cpu")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=1000))
    with pytest.raises(StoreError, match="AdamW, its states and gradients, takes"):
        stronghold.AdamW(model.parameters())


@pytest.mark.parametrize("where", ["weights", "moments"])
def test_a_flipped_bit_is_found_before_it_is_used(tmp_path, where):
    model, optimizer = start(tmp_path / "store")
    for i in range(2):
        step(model, optimizer, i)
    optimizer.wait()
    engine = engine_of(model)
    unit = engine.layers[3]
    tensor = unit.weight[0] if where == "weights" else optimizer.state[unit.parameters[0]]["exp_avg"]
    stored = engine.store._file_of(unit)
    # As the device would: past the page cache, and without our knowing.
    position = stored.find(tensor)
    with open(stored.paths[0], "r+b") as file:
        file.seek(position + 100)
        byte = file.read(1)[0]
        file.seek(position + 100)
        file.write(bytes([byte ^ 16]))
    if where == "moments":
        step_and_verify = partial(step, model, optimizer)
    else:
        step_and_verify = partial(stronghold.verify, model)
    with pytest.raises(CorruptionError, match="the data on disk was altered") as caught:
        step_and_verify()
        optimizer.wait()
    assert caught.value.path == str(stored.paths[0])
    assert str(caught.value).startswith("3: ")
    assert caught.value.offset == (position + 100) // 4096 * 4096


def test_a_file_that_was_cut_is_told(tmp_path):
    model, optimizer = start(tmp_path / "store")
    step(model, optimizer)
    optimizer.wait()
    file = engine_of(model).store._file_of(engine_of(model).layers[2])
    os.truncate(file.paths[0], 4096)
    with pytest.raises(DiskError, match=r"^2: .*ends at byte"):
        engine_of(model).store.verify()


def test_two_runs_on_one_directory_are_refused_and_the_first_goes_on(tmp_path):
    model, optimizer = start(tmp_path / "store")
    with pytest.raises(StoreError, match=rf"in use by another model .* \(process {os.getpid()}\)"):
        start(tmp_path / "store")
    other = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(
                f"""
                import torch, stronghold
                from torch.nn import Linear, Sequential
                model = Sequential(Linear(2, 2), Linear(2, 2))
                stronghold.offload(model, store={str(tmp_path / "store")!r}, device="cpu")
                """
            ),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "is in use by another run" in other.stderr
    step(model, optimizer)
    engine_of(model).store.verify()


def test_a_file_system_without_direct_io_is_buffered_and_says_so_once(tmp_path, monkeypatch, faults):
    monkeypatch.setattr(disk_errors, "_warned", set())
    faults += [Fault(kind="open", what="EINVAL", path_ends=f"{i}.bin") for i in range(4)]  # the first, direct one
    with pytest.warns(BufferedDiskWarning, match="refuses direct I/O") as caught:
        model, optimizer = start(tmp_path / "store")
    assert len([w for w in caught if w.category is BufferedDiskWarning]) == 1
    expected, theirs = start("ram")
    for i in range(3):
        step(model, optimizer, i)
        step(expected, theirs, i)
    assert differences(snapshot(model, optimizer), snapshot(expected, theirs)) == []


def test_a_file_system_that_promises_no_space_is_used_and_says_so_once(tmp_path, monkeypatch, faults):
    monkeypatch.setattr(disk_errors, "_warned", set())
    faults.append(Fault(kind="reserve", what="EOPNOTSUPP", times=None))
    with pytest.warns(UnreservedDiskWarning, match="cannot reserve space.*a step fails in the middle") as caught:
        model, optimizer = start(tmp_path / "store")
    assert len([w for w in caught if w.category is UnreservedDiskWarning]) == 1
    assert issubclass(UnreservedDiskWarning, RuntimeWarning)
    step(model, optimizer)


def test_a_device_that_fails_while_it_is_saved_in_place_says_so_and_it_is_no_checkpoint(tmp_path, faults):
    faults.append(Fault(kind="sync", what="EIO", path_ends="layer-00002.bin"))
    model, optimizer = start(tmp_path / "store")
    step(model, optimizer)
    with pytest.raises(DiskError, match=r"^2\b.*layer-00002\.bin") as caught:
        stronghold.checkpoint.save(tmp_path / "store", model, optimizer)
    assert caught.value.errno == errno.EIO
    assert not [name for name in os.listdir(tmp_path / "store") if "manifest" in name or "safetensors" in name]
    stronghold.checkpoint.save(tmp_path / "store", model, optimizer)


def test_the_system_s_own_disk_is_told(tmp_path, monkeypatch):
    model, optimizer = start(tmp_path / "store")
    step(model, optimizer)
    step(model, optimizer)
    report = stronghold.report(model)
    assert report.disk_paths == (str(tmp_path / "store"),)
    assert report.on_root_disk == (os.stat(tmp_path).st_dev == os.stat("/").st_dev)
    assert "in a thousand steps" in str(report)


def test_an_update_that_lands_late_is_not_taken_for_somebodys_write(tmp_path, faults):
    faults.append(Fault(kind="write", what="delay", times=None, delay_s=0.05))
    found = []
    for store in ("ram", tmp_path / "store"):
        model, optimizer = start(store, dtype=torch.bfloat16)
        held = [parameter.data for parameter in model.parameters()]
        for i in range(3):
            x = torch.randn(3, 64, generator=torch.Generator().manual_seed(i)).bfloat16()
            model(x).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(snapshot(model, optimizer))
        del held
    assert differences(*found) == []
