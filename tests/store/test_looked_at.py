"""Pages of a mapped file tell who looked at them, and checksums what was written there: no such write is corruption."""

from __future__ import annotations

import ctypes
import mmap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import stronghold
from stronghold.engine import engine_of
from stronghold.errors import CorruptionError
from stronghold.layout import PAGE_BYTES
from stronghold.native import Priority, checksums
from stronghold.store.looked_at import looked_at
from stronghold.store.unit_file import UnitFile
from tests.small import Residual, numbers

PAGES = 200


def test_pages_that_were_read_or_written_are_told_until_they_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGES * PAGE_BYTES))
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), PAGES * PAGE_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def pages(begin: int = 0, end: int = PAGES) -> list[int]:
        return looked_at(address + begin * PAGE_BYTES, (end - begin) * PAGE_BYTES, PAGE_BYTES).tolist()

    memory.madvise(mmap.MADV_DONTNEED)
    assert pages() == []
    memory[150 * PAGE_BYTES] = 1
    assert 150 in pages()
    assert pages(0, 100) == []
    assert pages(150, 151) == [0]
    assert memory[3 * PAGE_BYTES + 5] == 0
    assert {3, 150} <= set(pages())
    memory.madvise(mmap.MADV_DONTNEED)
    assert pages() == []


def test_pages_smaller_than_the_systems_are_all_told() -> None:
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    memory[mmap.PAGESIZE] = 1
    half = mmap.PAGESIZE // 2
    assert looked_at(address, 4 * mmap.PAGESIZE, half).tolist() == [2, 3]
    assert looked_at(address, 4 * mmap.PAGESIZE, 2 * mmap.PAGESIZE).dtype == np.int64


def step(model, optimizer, count=1):
    for batch in numbers(count):
        model(batch.to(next(model.parameters()).dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(params=["fp32", "bf16"])
def trained(request, tmp_path):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[request.param]
    torch.manual_seed(0)
    model = stronghold.offload(Residual(layers=4).eval(), window=2, device="cpu", store=tmp_path / "s", dtype=dtype)
    optimizer = stronghold.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer)
    return model, optimizer


HELD = {
    "a state dictionary": lambda model: model.state_dict(),
    "data of a root parameter": lambda model: model.out.weight.data,
    "a detached root parameter": lambda model: model.into.weight.detach(),
    "data of a layer's": lambda model: model.layers[1].up.weight.data,
}


@pytest.mark.parametrize("what", HELD)
def test_what_the_user_holds_does_not_end_training(trained, what):
    model, optimizer = trained
    held = HELD[what](model)
    step(model, optimizer, 3)
    stronghold.verify(model)
    del held
    step(model, optimizer, 2)
    stronghold.verify(model)


def test_a_write_into_a_moment_by_any_way_is_no_corruption(trained):
    model, optimizer = trained
    for parameter in (model.layers[0].up.weight, model.out.weight):
        optimizer.state[parameter]["exp_avg"].data.zero_()
        optimizer.state[parameter]["exp_avg_sq"].numpy()[:] = 0.0
    stronghold.verify(model)
    before = model.layers[0].up.weight.detach().clone()
    step(model, optimizer)
    stronghold.verify(model)
    assert not torch.equal(model.layers[0].up.weight, before)


def test_a_look_alone_changes_no_low_bit(tmp_path):
    """A page that was read is compared, not taken for written: in bf16 its masters keep their low bits."""

    def masters(look):
        torch.manual_seed(0)
        model = stronghold.offload(
            Residual(layers=4).eval(), window=2, device="cpu", store=tmp_path / str(look), dtype=torch.bfloat16
        )
        optimizer = stronghold.AdamW(model.parameters(), lr=0.01)
        for number in range(4):
            step(model, optimizer)
            if look:
                assert all(p.detach().clone().any() for p in model.parameters())
                if number == 1:
                    assert model.layers[2].down.weight.data.any()  # whose pages have no checksum from here on
                    assert model.layers[2].up.weight.sum().item() != 0.0
        optimizer.wait()
        return [unit.master(index).clone() for unit in engine_of(model).units for index in range(len(unit.parameters))]

    for got, expected in zip(masters(True), masters(False), strict=True):
        assert torch.equal(got, expected)


def test_a_disk_that_alters_what_was_written_is_still_found(trained):
    model, optimizer = trained
    optimizer.wait()
    file = engine_of(model).store._file_of(engine_of(model).layers[3])
    with file.paths[0].open("r+b") as file:
        file.seek(17)
        file.write(b"\xff")
    with pytest.raises(CorruptionError, match=r"layers\.3"):
        stronghold.verify(model)


def test_a_write_into_a_moment_while_a_layer_is_read_is_no_corruption(trained, monkeypatch):
    """The window reads layers in a thread of its own, which must not take the pages away that the user writes."""
    model, optimizer = trained
    moments = [optimizer.state[layer.up.weight]["exp_avg"].numpy() for layer in model.layers]
    wait, read = UnitFile.wait, threading.Event()

    def wait_slowly(file, transfers):
        if threading.current_thread() is not threading.main_thread():
            for moment in moments:
                moment[:] = 0.5
            read.set()
        wait(file, transfers)

    with monkeypatch.context() as patched:
        patched.setattr(UnitFile, "wait", wait_slowly)
        model(numbers(1)[0].to(next(model.parameters()).dtype))
        assert read.wait(60)
    stronghold.verify(model)
    assert all((moment == 0.5).all() for moment in moments)


def test_a_write_into_a_moment_before_its_weight_is_looked_at_is_no_corruption(trained):
    model, optimizer = trained
    for parameter in (model.layers[0].up.weight, model.out.weight):
        optimizer.state[parameter]["exp_avg"].numpy()[:] = 0.5
        assert parameter.data.any()
    stronghold.verify(model)


def test_a_write_is_found_once_though_a_thread_reads_meanwhile(trained, monkeypatch):
    """Found twice, the second time by the backward pass, it would seem a write between the passes."""
    model, optimizer = trained
    unit = engine_of(model).layers[1]
    optimizer.wait()
    file = engine_of(model).store._file_of(unit)
    file.changed()
    unit.weight[0].view(torch.uint8).numpy()[:] = 1
    compared, told = threading.Event(), threading.Event()

    def checksums_slowly(memory, sums):
        checksums(memory, sums)
        if threading.current_thread() is not threading.main_thread():
            compared.set()
            told.wait(0.5)

    monkeypatch.setattr("stronghold.store.unit_file.checksums", checksums_slowly)
    target = torch.empty(unit.slot_bytes, dtype=torch.uint8)
    begin = file.find(unit.buffer.flat)
    thread = threading.Thread(target=lambda: file.wait(file.read(target, begin, Priority.FETCH)))
    thread.start()
    assert compared.wait(60)
    (pages, _) = file.changed()
    told.set()
    thread.join()
    assert pages
    assert file.changed()[0] == []
