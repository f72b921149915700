"""Staging: layers are read before there is a slot for them, what has changed since is read again, and it is counted."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import torch
from torch import nn

import stronghold
from stronghold.device import CpuDevice, Event
from stronghold.engine import engine_of
from stronghold.engine.placement import plan
from stronghold.errors import BudgetError
from stronghold.layout import ALIGNMENT_BYTES
from stronghold.native import Disk
from stronghold.settings import OffloadSettings
from stronghold.store import disk as disk_module
from stronghold.store import ring
from stronghold.store.staging import BUFFERS
from tests.crossed import crossed
from tests.delayed import Apart, DelayedDevice
from tests.reference import differences, snapshot

LAYERS, SIZE = 6, 48


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()) for _ in range(LAYERS)))


def batch(seed):
    return torch.randn(3, SIZE, generator=torch.Generator().manual_seed(seed))


def offloaded(store, device, *, window=2, update="deferred", **settings):
    model = stronghold.offload(build(), window=window, store=store, device=device, **settings)
    return model, stronghold.AdamW(model.parameters(), lr=1e-2, update=update, threads=1)


def step(model, optimizer, seed, accumulate=1):
    for i in range(accumulate):
        model(batch(seed + 100 * i)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def nothing(model, optimizer, folder):
    pass


def evaluate(model, optimizer, folder):
    with torch.no_grad():
        model(batch(7))


def write(model, optimizer, folder):
    with torch.no_grad():
        model[2][0].weight.mul_(0.5)
        model[3][0].bias.data[0] = 7.0
        torch._foreach_mul_(list(model[4].parameters()), 1.5)


def write_through_an_alias_while_layers_are_read(model, optimizer, folder):
    alias = model[3][0].weight.data
    with torch.no_grad():
        model(batch(7))  # whatever is foreseen after it
        alias.mul_(0.5)
        model(batch(8))
        alias.mul_(0.5)


def load(model, optimizer, folder):
    if folder.exists():
        stronghold.checkpoint.load(folder, model, optimizer)
    else:
        stronghold.checkpoint.save(folder, model, optimizer)


def stop_in_the_middle(model, optimizer, folder):
    """A forward pass that ends early, whose backward pass never comes: what was foreseen does not happen."""
    model[:3](batch(9))


BETWEEN = [nothing, evaluate, write, write_through_an_alias_while_layers_are_read, load, stop_in_the_middle]


@pytest.mark.parametrize(
    ("between", "update"),
    crossed(BETWEEN, ["deferred", "in_backward"], together=1),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_whatever_comes_between_the_bits_are_those_of_memory(tmp_path, monkeypatch, between, update):
    monkeypatch.setattr(ring, "SLOT_BYTES", 4 * 2**20)
    accumulate = 2 if update == "deferred" else 1
    for window in (1, 2, 3, LAYERS):
        found = []
        for store, device in (("ram", "cpu"), (tmp_path / f"store{window}", Apart())):
            model, optimizer = offloaded(store, device, window=window, update=update)
            for seed in range(4):
                step(model, optimizer, seed, accumulate)
                between(model, optimizer, tmp_path / f"{window}{store == 'ram'}")
            found.append({"losses": {"last": model(batch(5)).detach()}, **snapshot(model, optimizer)})
        assert differences(*found) == []
        engine_of(model).store.verify()


def test_the_layer_after_next_is_read_before_there_is_a_slot_for_it(tmp_path, monkeypatch):
    """The computation of the first layer does not end until it is seen that three layers more than slots are read."""
    monkeypatch.setattr(disk_module, "Disk", partial(Disk, faults=[]))  # which counts its calls
    device, gate, seen = DelayedDevice(), Event(), []
    device.is_host = False
    model = stronghold.offload(build(), window=2, store=tmp_path / "store", device=device)
    store = engine_of(model).store

    def layers_read():
        return {int(call[1][-len("00000.bin") : -len(".bin")]) for call in store.disk.calls() if call[0] == "read"}

    def look():
        deadline = time.monotonic() + 20
        while layers_read() != {0, 1, 2, 3, 4} and time.monotonic() < deadline:
            time.sleep(1e-3)
        time.sleep(0.05)  # nor is anything else read
        seen.append(layers_read())
        gate.happen()

    device.lag.wait(gate)
    watcher = threading.Thread(target=look)
    watcher.start()
    with torch.no_grad():
        model(batch(0))
    watcher.join()
    assert seen == [{0, 1, 2, 3, 4}]
    device.settle()


def test_every_fetch_of_a_step_was_read_ahead_but_the_first_of_the_window(tmp_path):
    """And each layer is read once for each fetch: nothing that was read is thrown away."""
    model, optimizer = offloaded(tmp_path / "store", Apart())
    store, priorities = engine_of(model).store, []
    read = store._read

    def noted(unit, target, priority):
        priorities.append(priority.name)
        read(unit, target, priority)

    store._read = noted
    for seed in range(4):
        priorities.clear()
        step(model, optimizer, seed)
        store.device.reads.record().wait()
    fetches = stronghold.report(model).step.fetches
    assert fetches == 2 * LAYERS - 2
    assert sorted(priorities) == ["FETCH"] * 2 + ["READ_AHEAD"] * (fetches - 2)


def test_staging_is_pinned_memory_that_the_budget_counts_and_the_report_tells(tmp_path):
    layer = SIZE * (SIZE + 1) * 4
    pages = -(-SIZE * SIZE * 4 // 4096) + 1
    model, _ = offloaded(tmp_path / "one", Apart())
    device = engine_of(model).device
    assert device.pageable_bytes + device.pinned_bytes == stronghold.report(model).host_bytes
    held = {}
    for name, other in (("host", CpuDevice()), ("apart", Apart())):
        model = stronghold.offload(build(), window=2, store=tmp_path / name, device=other)
        held[name] = stronghold.report(model).host_bytes
    assert held["apart"] - held["host"] == BUFFERS * pages * 4096
    # As much as the smallest optimizer needs of a device whose slots are host memory, and staging beside it.
    least = smallest_budget(tmp_path, CpuDevice)
    assert smallest_budget(tmp_path, Apart) == least + BUFFERS * pages * 4096
    assert least > ring.SLOTS * layer + 2 * layer


def smallest_budget(tmp_path, device):
    low, high = 0, 2**24
    while low < high:
        middle = (low + high) // 2
        try:
            plan(build(), None, None, OffloadSettings(store=tmp_path, host_memory=middle), device())
            high = middle
        except BudgetError:
            low = middle + 1
    return low


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 1.2, 3.0])
def test_a_host_budget_is_kept_with_staging_in_it(tmp_path, share):
    """With all gradients there, what is left goes to weights and states, and not what staging takes."""
    gradients = LAYERS * (SIZE * (SIZE + 1) * 4 + 4 * ALIGNMENT_BYTES)
    budget = smallest_budget(tmp_path, Apart) + gradients + int(share * LAYERS * SIZE * (SIZE + 1) * 16)
    found = []
    for store, device, given in (("ram", "cpu", None), (tmp_path / "store", Apart(), budget)):
        model, optimizer = offloaded(store, device, host_memory=given)
        for seed in range(3):
            step(model, optimizer, seed)
        found.append(snapshot(model, optimizer))
    assert differences(*found) == []
    assert stronghold.report(model).host_bytes <= budget
