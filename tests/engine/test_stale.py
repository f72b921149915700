"""A backward pass whose forward pass had other weights is refused, wherever the weights are and whoever wrote them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stronghold
from stronghold.errors import OffloadedModelError
from stronghold.unit import unit_of
from tests.crossed import crossed
from tests.small import SIZE, Block, Residual, Spectral, numbers, pair

OF_LAYERS = "must be the same in the backward pass"
OF_ROOT = "modified by an inplace operation"  # torch's own


class Shift(nn.Module):
    """A layer whose backward pass needs none of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "ours": stronghold.AdamW,
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),  # counts no version
    "foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
}
PLACED = ({"window": 1}, {"resident": 4}, {"activations": "keep"}, {"activations": "keep", "resident": 4})


def early(model: nn.Module, optimizer: Any) -> Tensor:
    """Returns the loss of a forward pass, behind which the optimizer has taken a step."""
    loss = model(numbers(2)[0])
    model(numbers(2)[1]).backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("placed", PLACED, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("block", [None, Spectral])
def test_layers(block: Any, name: str, placed: dict[str, Any]) -> None:
    """What multiplies in a parametrisation is made of weights: the first that autograd tells of it is a bias."""
    _, model = pair(lambda: Residual(block=block) if block else Residual(), **placed)
    loss = early(model, OPTIMIZERS[name](model.layers.parameters()))
    with pytest.raises(OffloadedModelError, match=OF_LAYERS):
        loss.backward()


@pytest.mark.parametrize("activations", ["recompute", "keep", "host"])
def test_a_weight_that_the_user_writes(activations: str) -> None:
    _, model = pair(Residual, activations=activations)
    loss = model(numbers(1)[0])
    with torch.no_grad():
        model.layers[2].up.weight.mul_(2)
    with pytest.raises(OffloadedModelError, match=OF_LAYERS):
        loss.backward()


@dataclass(slots=True)
class Output:
    hidden: Tensor


class Wrapped(Block):
    """A layer that returns its output in an object of a class of the model's own."""

    def forward(self, x: Tensor | Output) -> Output:
        return Output(super().forward(x.hidden if isinstance(x, Output) else x))


class OutOfWrapped(Residual):
    def __init__(self) -> None:
        super().__init__(block=Wrapped)

    def features(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x.hidden)


@pytest.mark.parametrize("placed", PLACED[:2], ids=str)
@pytest.mark.parametrize("activations", ["recompute", "keep", "host"])
def test_what_a_layer_returns_may_be_an_object(activations: str, placed: dict[str, Any]) -> None:
    plain, model = pair(OutOfWrapped, activations=activations, **placed)
    for one in (plain, model):
        torch.manual_seed(1)
        one(numbers(1)[0]).backward()
    same_gradients(plain, model)
    loss = model(numbers(1)[0])
    model.layers[2].up.weight.data.mul_(2)
    with pytest.raises(OffloadedModelError, match=OF_LAYERS):
        loss.backward()


def copied_over(parameter: Tensor, value: Tensor) -> None:
    ctypes.memmove(parameter.data_ptr(), value.data_ptr(), value.nbytes)


UNSEEN: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda p: p.data.mul_(0.5),
    "one element": lambda p: p.data[3, 2].add_(1),
    "rows turned round": lambda p: p.data.copy_(p.data.flip(0)),
    "numpy": lambda p: p.detach().numpy().__imul__(0.5),
    "pointer": lambda p: copied_over(p, torch.ones_like(p)),
}
"""Writes that no version tells of."""
WINDOWS = ({"window": 1}, {"window": 2}, {"resident": 4}, {"store": "disk", "window": 1})


@pytest.mark.parametrize(
    ("how", "activations", "placed", "layer"),
    crossed(list(UNSEEN), ["recompute", "keep", "host"], list(WINDOWS), [0, 3]),  # fetched again, still in its slot
    ids=str,
)
def test_a_weight_that_is_written_unseen(
    how: str, activations: str, placed: dict[str, Any], layer: int, tmp_path: Path
) -> None:
    """Plain PyTorch goes on, with activations of one and weights of another."""
    placed = {**placed, "store": [str(tmp_path)] if "store" in placed else "ram"}
    plain, model = pair(Residual, activations=activations, **placed)
    weight = model.layers[layer].up.weight
    loss = model(numbers(1)[0])
    with torch.no_grad():
        UNSEEN[how](weight)
    with pytest.raises(OffloadedModelError, match=OF_LAYERS):
        loss.backward()
    with torch.no_grad():
        plain.layers[layer].up.weight.copy_(weight)
    model.zero_grad()
    for one in (plain, model):
        torch.manual_seed(1)
        one(numbers(1)[0]).backward()
    same_gradients(plain, model)


@pytest.mark.parametrize("element", [..., (3, 2)], ids=["all", "one element"])
@pytest.mark.parametrize("placed", WINDOWS, ids=str)
@pytest.mark.parametrize("activations", ["recompute", "keep", "host"])
def test_a_tensor_that_was_held_before_the_forward_pass(
    activations: str, placed: dict[str, Any], element: Any, tmp_path: Path
) -> None:
    """One element of a resident layer that autograd keeps by itself goes on, to the bits of plain PyTorch."""
    goes_on = activations == "keep" and "resident" in placed and element is not ...
    placed = {**placed, "store": [str(tmp_path)] if "store" in placed else "ram"}
    plain, model = pair(Residual, activations=activations, **placed)
    losses = []
    for one in (plain, model):
        held = one.layers[3].up.weight.data
        torch.manual_seed(1)
        losses.append(one(numbers(1)[0]))
        held[element] += 1
    losses[0].backward()
    if goes_on:
        losses[1].backward()
        same_gradients(plain, model)
    else:
        with pytest.raises(OffloadedModelError, match=OF_LAYERS):
            losses[1].backward()


@pytest.mark.parametrize("placed", WINDOWS, ids=str)
@pytest.mark.parametrize("activations", ["recompute", "keep", "host"])
def test_a_weight_that_is_read_or_written_back(activations: str, placed: dict[str, Any], tmp_path: Path) -> None:
    """Also where the graph is kept for a second backward pass, and where the loss is held across a step."""
    placed = {**placed, "store": [str(tmp_path)] if "store" in placed else "ram"}
    plain, model = pair(Residual, activations=activations, **placed)
    held = [p.data for p in model.parameters()]
    for one in (plain, model):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for x in numbers(3):
            loss = one(x)
            weight = one.layers[3].up.weight
            weight.data.neg_()
            weight.data.neg_()
            loss.backward(retain_graph=True)
            assert weight.data.norm() > 0
            loss.backward()
            optimizer.step()
    same_gradients(plain, model)
    assert len(held) == len(list(model.parameters()))


def test_a_graph_that_is_kept() -> None:
    _, model = pair(Residual, window=1)
    loss = model(numbers(1)[0])
    loss.backward(retain_graph=True)
    model.layers[3].up.weight.data.mul_(0.5)
    with pytest.raises(OffloadedModelError, match=OF_LAYERS):
        loss.backward()


def same_gradients(plain: nn.Module, model: nn.Module) -> None:
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("name", ["ours", "foreach"])
def test_the_root(name: str, activations: str) -> None:
    """Of layers that need no weights alone the root's tell; plain PyTorch refuses the same, by the same words."""
    plain, model = pair(lambda: Residual(block=Shift), activations=activations)
    with pytest.raises(RuntimeError, match=OF_ROOT):
        early(plain, torch.optim.AdamW(plain.parameters())).backward()
    with pytest.raises(RuntimeError, match=OF_ROOT):
        early(model, OPTIMIZERS[name](model.parameters())).backward()


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_what_needs_no_weights_goes_on_as_plain_pytorch_does(activations: str) -> None:
    plain, model = pair(lambda: Residual(block=Shift), activations=activations)
    early(plain, torch.optim.AdamW(plain.layers.parameters())).backward()
    early(model, torch.optim.AdamW(model.layers.parameters())).backward()
    same_gradients(plain, model)


def test_a_checkpoint_that_is_loaded_in_between(tmp_path: Path) -> None:
    for block, said in ((Spectral, f"{OF_LAYERS}|{OF_ROOT}"), (Shift, OF_ROOT)):
        _, model = pair(lambda block=block: Residual(block=block))
        optimizer = stronghold.AdamW(model.parameters())
        path = stronghold.checkpoint.save(tmp_path / block.__name__, model, optimizer)
        loss = model(numbers(1)[0])
        stronghold.checkpoint.load(path, model, optimizer)
        with pytest.raises(RuntimeError, match=said):
            loss.backward()


class TwoViews(Residual):
    """Root parameters that are views of one memory, and share its version."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(2, SIZE)
        self.one, self.other = nn.Parameter(memory[0]), nn.Parameter(memory[1])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.one.to(x.dtype) + self.other.detach().to(x.dtype))


class AcrossLayers(Residual):
    """Both layers use the first one's weight, which is of the root by that, and shares a version with its bias."""

    def __init__(self) -> None:
        super().__init__(2)
        for layer in self.layers:
            memory = torch.randn(SIZE * SIZE + SIZE).mul(0.2)
            layer.up = nn.Linear(SIZE, SIZE)
            layer.up.weight = nn.Parameter(memory[: SIZE * SIZE].view(SIZE, SIZE))
            layer.up.bias = nn.Parameter(memory[SIZE * SIZE :])
            layer.down = nn.Linear(SIZE, SIZE)
        self.layers[1].up.weight = self.layers[0].up.weight


@pytest.mark.parametrize("build", [TwoViews, AcrossLayers])
def test_an_update_of_one_of_several_views_leaves_the_low_bits_of_the_others(build: Any) -> None:
    _, model = pair(build, dtype=torch.bfloat16, window=1)
    one, other = (model.one, model.other) if build is TwoViews else (model.layers[0].up.weight, model.layers[0].up.bias)
    assert one._version == other._version
    optimizer = stronghold.AdamW([one], lr=1e-2)
    unit, index = unit_of(other), other.__dict__["_index"]
    assert unit is not None and unit_of(one).is_root
    before = unit.owner.settled_value(unit, index, exact=True).clone()
    assert not torch.equal(before.bfloat16().float(), before), "there are no low bits to lose"
    for _ in range(2):
        model(numbers(1)[0].bfloat16()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert one._version == other._version
    assert torch.equal(unit.owner.settled_value(unit, index, exact=True), before)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_a_second_backward_pass_of_layers_that_the_first_has_updated_names_the_setting(activations: str) -> None:
    model = stronghold.offload(Residual(), device="cpu", window=1, activations=activations)
    optimizer = stronghold.AdamW(model.parameters(), update="in_backward")
    loss = model(numbers(1)[0])
    loss.backward(retain_graph=True)
    with pytest.raises(OffloadedModelError, match=r"added to by a second backward\(\) .* use update='deferred'"):
        loss.backward()
    del optimizer
