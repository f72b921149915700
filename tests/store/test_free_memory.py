"""Host memory that cannot be had is refused; what is only not free at the moment is told of."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import psutil
import pytest
import torch

import stronghold
from stronghold import native
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
    assert seen == [stronghold.report(model).host_bytes]
