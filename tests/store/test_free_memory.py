"""Host memory that cannot be had is refused; what is only not free at the moment is told of."""

from __future__ import annotations

import gc
import warnings
from types import SimpleNamespace

import psutil
import pytest
import torch

import stronghold
from stronghold import native
from stronghold.engine import engine_of
from stronghold.store import SLOTS
from stronghold.store.ring import Ring
from stronghold.unit import unit_of
from tests.small import Residual, numbers, ordinary_loop


@pytest.fixture
def machine(monkeypatch):
    """A machine of 64 GiB, of which as good as nothing is available."""
    memory = SimpleNamespace(total=2**36, available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=0, free=0))
    return memory


def offloaded():
    torch.manual_seed(0)
    return stronghold.offload(Residual(), device="cpu", window=1)


def test_memory_that_is_not_free_now_is_told_of_once_and_training_goes_on(machine):
    """A virtual machine gets more as it uses it, and other programs' caches give way."""
    model = offloaded()
    remedies = r"available now: .*Close what else .*states='8bit' or update='in_backward', freeze parameters"
    with pytest.warns(
        RuntimeWarning, match=rf"AdamW, its states .* takes .*KiB of host memory.* 1000 B {remedies}"
    ) as w:
        optimizer = stronghold.AdamW(model.parameters())
    assert [warning.filename for warning in w] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ordinary_loop(model, optimizer, numbers(2))
        del optimizer
        stronghold.AdamW(model.parameters())


def test_memory_that_the_machine_does_not_have_is_refused(machine):
    model = offloaded()
    held = stronghold.report(model).host_bytes
    machine.total = held + 1000
    with pytest.raises(
        MemoryError, match=r"takes .*KiB .*beside .*KiB that are held .* leaves 1000 B; use states='8bit'"
    ):
        stronghold.AdamW(model.parameters())
    assert stronghold.report(model).host_bytes == held
    machine.total = machine.available = 2**36
    ordinary_loop(model, stronghold.AdamW(model.parameters()), numbers(1))


def test_what_is_needed_is_compared_with_what_is_left_beside_what_is_held(machine, monkeypatch):
    model, seen = offloaded(), []
    monkeypatch.setattr(native, "most_host_bytes", lambda held: seen.append(held) or 0)
    with pytest.raises(MemoryError):
        stronghold.AdamW(model.parameters())
    assert set(seen) == {stronghold.report(model).host_bytes}


def unfrozen_later(**settings):
    """A model in bf16 that was frozen when it was offloaded: it has no masters and no ring."""
    torch.manual_seed(0)
    model = Residual().bfloat16().requires_grad_(False)
    return stronghold.offload(model, device="cpu", window=1, **settings).requires_grad_(True)


def test_masters_that_come_late_are_counted_before_the_optimizer_is_made(machine):
    model = unfrozen_later()
    before = stronghold.report(model).host_bytes
    optimizer = stronghold.AdamW(model.parameters(), update="in_backward")
    taken = stronghold.report(model).host_bytes
    assert taken - before >= 10 * sum(p.numel() for p in model.parameters()), "moments and the low bits of masters"
    ordinary_loop(model, optimizer, [batch.bfloat16() for batch in numbers(1)])
    assert all(len(unit.masters.remainders) == len(unit.parameters) for unit in engine_of(model).units)
    model = unfrozen_later()
    machine.total = machine.available = taken - 1
    with pytest.raises(MemoryError, match=r"AdamW, its states and gradients, takes"):
        stronghold.AdamW(model.parameters(), update="in_backward")
    assert stronghold.report(model).host_bytes == before
    machine.total = machine.available = taken
    optimizer = stronghold.AdamW(model.parameters(), update="in_backward")
    assert stronghold.report(model).host_bytes == taken


def test_masters_of_what_is_unfrozen_behind_the_optimizer_are_refused_before_anything_is_updated(machine):
    model = unfrozen_later().requires_grad_(False)
    model.out.requires_grad_(True)
    optimizer = stronghold.AdamW(model.parameters())
    model.requires_grad_(True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(numbers(1)[0].bfloat16()).backward()
    held = stronghold.report(model).host_bytes
    moments = 8 * sum(p.numel() for name, p in model.named_parameters() if not name.startswith("out"))
    machine.total = machine.available = held + moments + 1000
    with pytest.raises(MemoryError, match=r"AdamW's state of .* takes .* KiB of host memory beside .* leaves"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    machine.total = machine.available = 2**36
    optimizer.step()
    optimizer.wait()
    assert not all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_remainder_is_refused_where_there_is_no_memory_for_it(machine):
    model = unfrozen_later()
    unit = unit_of(model.layers[0].up.weight)
    machine.total = machine.available = stronghold.report(model).host_bytes + 100
    with pytest.raises(MemoryError, match=r"the low bits of layers\.0's fp32 masters takes .* leaves 100 B"):
        unit.remainder(2)
    assert not unit.masters


def test_a_ring_that_comes_late_is_counted(machine, tmp_path):
    model = unfrozen_later(store=tmp_path / "first")
    optimizer = stronghold.AdamW(model.parameters(), update="in_backward")
    taken = stronghold.report(model).host_bytes
    model = unfrozen_later(store=tmp_path / "store")
    held = stronghold.report(model).host_bytes
    assert taken - held >= SLOTS * 10 * sum(p.numel() for p in model.layers[0].parameters())
    machine.total = machine.available = taken - 1
    with pytest.raises(MemoryError, match=r"AdamW, its states and gradients, takes .* KiB of host memory beside"):
        stronghold.AdamW(model.parameters(), update="in_backward")
    assert stronghold.report(model).host_bytes == held
    machine.total = machine.available = taken
    optimizer = stronghold.AdamW(model.parameters(), update="in_backward")
    assert stronghold.report(model).host_bytes == taken
    machine.total = machine.available = 2**36
    ordinary_loop(model, optimizer, [batch.bfloat16() for batch in numbers(1)])


def test_a_ring_that_is_gone_is_made_anew_where_there_is_room(machine, tmp_path):
    model = stronghold.offload(Residual(), device="cpu", window=1, store=tmp_path)
    optimizer = stronghold.AdamW(model.parameters(), update="in_backward")
    store, held = engine_of(model).store, stronghold.report(model).host_bytes
    store._ring = Ring(store.device, *store.streams)
    machine.total = machine.available = held - 1
    with pytest.raises(MemoryError, match=r"the ring through which layers on disk are updated takes .* KiB of host"):
        model(numbers(1)[0]).backward()
    machine.total = machine.available = 2**36
    optimizer.zero_grad()
    ordinary_loop(model, optimizer, numbers(2))
    assert stronghold.report(model).host_bytes == held


def linears(**settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(16)))
    return stronghold.offload(model, device="cpu", window=1, **settings)


@pytest.mark.parametrize("on_disk", [False, True])
def test_memory_of_an_optimizer_that_its_scheduler_refers_to_is_there_for_the_next_one(on_disk, tmp_path):
    """On disk the ring is no longer than the next one needs, either."""
    settings, memory = {"store": tmp_path / "second"} if on_disk else {}, "18MiB"
    if on_disk:
        first = linears(store=tmp_path / "first")
        optimizer = stronghold.AdamW(first.parameters())
        memory = stronghold.report(first).host_bytes
    model = linears(host_memory=memory, **settings)
    gc.disable()
    try:
        optimizer = stronghold.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        optimizer.scheduler = scheduler  # with every torch
        del optimizer, scheduler
        stronghold.AdamW(model.parameters())
    finally:
        gc.enable()
