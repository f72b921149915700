"""A model that goes while the streams work for it: what is under way ends first, and then everything is given back."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

import stronghold
from stronghold.errors import OffloadedModelError
from tests.crossed import crossed
from tests.delayed import DelayedDevice
from tests.test_ordering import Model


@pytest.mark.parametrize(("update", "store"), crossed(["deferred", "in_backward"], ["ram", "disk"], together=1))
def test_a_model_may_go_amid_a_prefetch(tmp_path, monkeypatch, store, update):
    """With fetches, gradients and updates that are all late, so that each is under way when the model goes."""
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    before = {thread.ident for thread in threading.enumerate()}
    device = DelayedDevice(3, fetches=0.05, gradients=0.02, updates=0.02, reads=0.05)
    where = {"store": tmp_path / "store"} if store == "disk" else {}
    model = stronghold.offload(Model(), window=1, device=device, **where)
    optimizer = stronghold.AdamW(model.parameters(), update=update)
    for _ in range(2):
        model(torch.ones(6, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    slots = [weakref.ref(slot.flat) for slot in model._stronghold.window.slots]
    streams = [device.fetches, device.gradients, device.updates]
    copied = device.fetches.record()
    assert not copied.done  # the next step's first layer is on its way
    del model, optimizer
    gc.collect()
    for stream in streams:
        stream.record().wait()  # raises what failed for what had gone
    del device, stream, streams
    deadline = time.monotonic() + 20
    while any(slot() is not None for slot in slots) or left(before) or (tmp_path / "store").exists():
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.02)
    assert failed == []


def left(before: set[int | None]) -> set[int | None]:
    return {thread.ident for thread in threading.enumerate()} - before


def test_a_model_that_is_closed_gives_back_what_each_of_its_optimizers_holds():
    model = stronghold.offload(Model(), window=1, device="cpu")
    halves = [list(model.parameters())[:4], list(model.parameters())[4:]]
    optimizers = [stronghold.AdamW(half) for half in halves]
    model(torch.ones(6, 8)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    moments = [
        weakref.ref(optimizer.state[half[0]]["exp_avg"]) for optimizer, half in zip(optimizers, halves, strict=True)
    ]
    stronghold.close(model)
    gc.collect()
    assert [moment() for moment in moments] == [None, None]
    for optimizer in optimizers:
        with pytest.raises(OffloadedModelError, match="closed"):
            optimizer.step()
        with pytest.raises(OffloadedModelError, match="closed"):
            _ = optimizer.state


def test_an_optimizer_counts_as_long_as_it_is_there_whichever_was_made_last():
    model = stronghold.offload(Model(), window=1, device="cpu")
    halves = [list(model.parameters())[:4], list(model.parameters())[4:]]
    first, second = (stronghold.AdamW(half) for half in halves)
    del second
    gc.collect()
    assert stronghold.report(model).states == first.states
    with pytest.raises(OffloadedModelError, match="needs the model's only optimizer"):
        stronghold.AdamW(halves[1], update="in_backward")
    del first
    gc.collect()
    assert stronghold.report(model).states is None
    stronghold.AdamW(model.parameters(), update="in_backward")
