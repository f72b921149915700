"""Weights that are written behind an evaluation, by a device that is behind the host, are not in it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import stronghold
from tests.gpu import DEVICE, needs_device, sleep

pytestmark = [pytest.mark.gpu, needs_device]

SIZE = 64
LATE_MS = 30


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Layers behind a frozen one, so that nothing of a step is on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE).requires_grad_(False)
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def batch(seed: int) -> Tensor:
    return torch.randn(16, SIZE, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.fixture
def plain() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize("place", [{"window": 2}, {"window": 2, "activations": "keep"}, {"window": 1, "resident": 2}])
def test_an_update_waits_for_what_an_evaluation_reads(place, plain):
    """The updates wrote host weights that the evaluation's fetches had still to read."""

    def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        found, batches, x = [], [batch(seed) for seed in range(4)], batch(9)  # to bring one there waits for the device
        for one in batches:
            model(one).backward()
            sleep(LATE_MS)
            with torch.no_grad():
                found.append(model(x))
            optimizer.step()
            optimizer.zero_grad()
        return [loss.item() for loss in found]

    model = stronghold.offload(copy.deepcopy(plain), device=DEVICE, **place)
    plain.to(DEVICE)
    trained, others = ([p for p in one.parameters() if p.requires_grad] for one in (plain, model))
    expected = losses(plain, torch.optim.AdamW(trained, lr=1e-2))
    assert losses(model, stronghold.AdamW(others, lr=1e-2)) == pytest.approx(expected, rel=1e-4)


def zeroed(model: Model) -> None:
    for parameter in model.layers.parameters():
        parameter.copy_(torch.zeros_like(parameter))


def zeroed_by_data(model: Model) -> None:
    for parameter in model.layers.parameters():
        parameter.data.zero_()


def multiplied(model: Model) -> None:
    torch._foreach_mul_([*model.layers.parameters()], 0.0)


def initialised(model: Model) -> None:
    for parameter in model.layers.parameters():
        nn.init.zeros_(parameter)


def loaded(model: Model) -> None:
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})


def stepped(model: Model) -> None:
    for parameter in model.layers.parameters():
        parameter.grad = parameter.detach().clone()
    torch.optim.SGD(model.layers.parameters(), lr=1.0).step()


@pytest.mark.parametrize("write", [zeroed, zeroed_by_data, multiplied, initialised, loaded, stepped])
@pytest.mark.parametrize("on_disk", [False, True], ids=["ram", "disk"])
def test_what_the_user_writes_is_not_in_the_evaluation_before(on_disk, write, plain, tmp_path):
    def loss(model: nn.Module) -> float:
        x = batch(9)
        sleep(LATE_MS)
        with torch.no_grad():
            found = model(x)
            write(model)
        return found.item()

    place = {"store": tmp_path} if on_disk else {}
    model = stronghold.offload(copy.deepcopy(plain), device=DEVICE, window=2, **place)
    assert loss(model) == pytest.approx(loss(plain.to(DEVICE)), rel=1e-4)


def test_nor_what_is_written_by_memory_that_is_held(plain):
    def losses(model: Model) -> list[float]:
        memory, found, x = [parameter.data for parameter in model.layers.parameters()], [], batch(9)
        for _ in range(3):
            sleep(LATE_MS)
            with torch.no_grad():
                found.append(model(x))
                for values in memory:
                    values.mul_(0.5)
        return [loss.item() for loss in found]

    model = stronghold.offload(copy.deepcopy(plain), device=DEVICE, window=2)
    assert losses(model) == pytest.approx(losses(plain.to(DEVICE)), rel=1e-4)
