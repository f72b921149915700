"""The random states of a checkpoint: of whatever accelerator is used, which a stand-in of its module plays here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stronghold.checkpoint.plain import from_plain, to_plain
from stronghold.checkpoint.random_states import put_random_states, take_random_states


class Module:
    """What torch.cuda, torch.xpu and other devices' modules have."""

    def __init__(self) -> None:
        self.states = {0: torch.tensor([1, 2], dtype=torch.uint8), 1: torch.tensor([3, 4], dtype=torch.uint8)}

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.states[device.index].clone()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.states[device.index] = state.clone()


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Module]:
    modules = {"cuda": Module(), "xpu": Module()}
    monkeypatch.setattr(torch, "get_device_module", lambda device: modules[device.type])
    monkeypatch.setattr(torch.cuda, "get_rng_state", modules["cuda"].get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", modules["cuda"].set_rng_state)
    return modules


def kept(device: torch.device) -> Any:
    return from_plain(to_plain(take_random_states(device)))


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_an_accelerators_generator_is_put_back(modules: dict[str, Module], kind: str) -> None:
    device = torch.device(kind, 1)
    saved = kept(device)
    modules[kind].states[1] = torch.tensor([9, 9], dtype=torch.uint8)
    put_random_states(saved, device)
    assert modules[kind].states[1].tolist() == [3, 4]
    assert modules[kind].states[0].tolist() == [1, 2]


@pytest.mark.parametrize(("saved_on", "restored_on"), [("cuda", "xpu"), ("xpu", "cuda"), ("cpu", "xpu")])
def test_another_kinds_generator_is_left_alone(modules: dict[str, Module], saved_on: str, restored_on: str) -> None:
    saved = kept(torch.device(saved_on, 0) if saved_on != "cpu" else torch.device("cpu"))
    draws = torch.rand(3)
    put_random_states(saved, torch.device(restored_on, 1))
    assert modules[restored_on].states[1].tolist() == [3, 4]
    assert torch.equal(torch.rand(3), draws)  # the host's own are put back in any case


def test_the_host_has_one_generator() -> None:
    assert sorted(take_random_states(torch.device("cpu"))) == ["numpy", "python", "torch"]
