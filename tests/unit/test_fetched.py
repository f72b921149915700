"""The host waits for a layer's fetch before it, or another replica, may write the layer's weights."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

import stronghold
from stronghold.device import Wait
from stronghold.engine import engine_of
from stronghold.engine.agreeing import agree_on_step
from stronghold.unit.fetched import Fetched


class Noting:
    """Notes what the host waits for."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def host(self, event: object, reason: Wait) -> None:
        self.seen.append((event, reason))


def test_the_host_waits_once_for_the_newest():
    waits, fetched = Noting(), Fetched()
    fetched.wait()
    fetched.begin("first", waits)
    fetched.begin("second", waits)
    fetched.use(held=False)
    assert waits.seen == []
    fetched.use(held=True)
    fetched.wait()
    assert waits.seen == [("second", Wait.WEIGHTS_FETCHED)]
    assert fetched.event is None


def test_replicas_wait_for_their_own_fetches_before_they_agree_on_a_step():
    """Each updates its share of what all read."""
    model = stronghold.offload(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), device="cpu", window=1)
    optimizer = stronghold.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    units, waits = engine_of(model).layers, Noting()
    for unit in units:
        unit.fetched.begin(unit.name, waits)
    replicas = SimpleNamespace(world_size=2, agree=lambda *_, **__: waits.seen.append("agreed"))
    agree_on_step(replicas, optimizer, {unit: {0: unit.parameters[0].grad} for unit in units})
    assert waits.seen == [*((unit.name, Wait.WEIGHTS_FETCHED) for unit in units), "agreed"]
