"""An offloaded model under DistributedDataParallel, which would average gradients that it never sees."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stronghold
from stronghold.errors import OffloadedModelError
from tests.small import Block, Residual, numbers


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Distilled(nn.Module):
    """A student that learns what a frozen teacher says."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.teacher = teacher.requires_grad_(False)
        self.student = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.teacher(self.student(x)) - self.teacher(x)).pow(2).mean()


def row() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


@pytest.mark.parametrize("settings", [{"window": 1}, {"window": 2, "activations": "keep"}, {"resident": 3}])
@pytest.mark.parametrize("first", ["offload", "wrap"])
def test_it_is_refused_before_a_gradient_is_wrong(first: str, settings: dict[str, object]) -> None:
    model = Residual(block=lambda: Block(dropout=0.0))
    wrapped = DistributedDataParallel(model) if first == "wrap" else None
    stronghold.offload(model, device="cpu", **settings)
    wrapped = wrapped or DistributedDataParallel(model)
    expected = copy.deepcopy(model)
    batch = numbers(1)[0]
    with pytest.raises(
        OffloadedModelError,
        match=r"averages.*forward pass of a Residual under it.*without DistributedDataParallel.*replicate",
    ):
        wrapped(batch)
    with torch.no_grad():
        assert torch.equal(wrapped(batch), expected(batch))
    for one in (model, expected):  # which trains without it as before
        one(batch).backward()
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


def test_of_a_frozen_part_it_averages_nothing() -> None:
    teacher = row()
    expected, model = Distilled(copy.deepcopy(teacher)), Distilled(teacher)
    stronghold.offload(model.teacher, device="cpu", window=1)
    for one in (DistributedDataParallel(expected), DistributedDataParallel(model)):
        one(torch.ones(4, 8)).backward()
    assert expected.student.weight.grad.abs().sum() > 0
    assert torch.equal(model.student.weight.grad, expected.student.weight.grad)


def test_a_frozen_part_costs_no_look_at_all_parameters(monkeypatch) -> None:
    """Each layer asks, in each forward pass."""
    model = Distilled(row())
    stronghold.offload(model.teacher, device="cpu", window=1)
    averaged = DistributedDataParallel(model)
    looks = []
    monkeypatch.setattr(model, "named_parameters", lambda: looks.append(1) or nn.Module.named_parameters(model))
    averaged(torch.ones(4, 8)).backward()
    assert not looks


@pytest.mark.parametrize("trained", ["layers.1.up.weight", "out.bias"])
def test_what_is_trained_of_a_frozen_model_is_refused(trained: str) -> None:
    model = Residual(block=lambda: Block(dropout=0.0)).requires_grad_(False)
    model.get_parameter(trained).requires_grad_(True)
    stronghold.offload(model, device="cpu", window=1)
    batch = numbers(1)[0]
    with pytest.raises(OffloadedModelError, match=f"and {trained} offloaded"):
        DistributedDataParallel(model)(batch).backward()


def test_what_is_beside_an_offloaded_model_may_be_averaged() -> None:
    torch.manual_seed(1)
    model, head = row(), nn.Linear(8, 8)
    expected, its_head = copy.deepcopy(model), copy.deepcopy(head)
    stronghold.offload(model, device="cpu", window=1)
    averaged = DistributedDataParallel(head)
    averaged(model(torch.ones(4, 8))).sum().backward()
    its_head(expected(torch.ones(4, 8))).sum().backward()
    trained, plain = [*model.parameters(), *head.parameters()], [*expected.parameters(), *its_head.parameters()]
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(trained, plain, strict=True))
