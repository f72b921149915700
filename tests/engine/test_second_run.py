"""A layer's second run computes what its first did, or says why not, whatever its arguments are."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import stronghold
from tests.small import LENGTH, SAMPLES, SIZE

WAYS = ["recompute", "keep", "host", "disk"]
WRITTEN = "an in-place operation has written it|modified by an inplace operation"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(SIZE, SIZE), nn.Parameter(torch.randn(SIZE))

    def own(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x + self.bias))

    def forward(self, x: Any) -> Any:
        return self.own(x)


class Row(nn.Module):
    """Layers of a kind, called by ``drive``."""

    def __init__(self, kind: Callable[[], nn.Module], drive: Callable[[nn.ModuleList, Tensor], Tensor]) -> None:
        super().__init__()
        self.into, self.layers = nn.Linear(SIZE, SIZE), nn.ModuleList(kind() for _ in range(4))
        self.drive = drive

    def forward(self, x: Tensor) -> Tensor:
        return self.drive(self.layers, self.into(x)).square().mean()


def losses_of(model: nn.Module, *, between: Callable[[nn.Module], None] = lambda model: None, passes: int = 1) -> list:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(SAMPLES, LENGTH, SIZE))
        optimizer.zero_grad()
        between(model)
        for left in reversed(range(passes)):
            loss.backward(retain_graph=left > 0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def both(tmp_path: Path, kind: Any, drive: Any, activations: str, **settings: Any) -> list[nn.Module]:
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(Row(kind, drive))
    store = tmp_path / "store" if activations == "disk" else "ram"
    stronghold.offload(models[1], device="cpu", window=2, activations=activations, store=store, **settings)
    return models


def one_after_another(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


class Drawing(Layer):
    """Draws what it drops from a generator of its own, ``make``'s."""

    make: Callable[[], Any]

    def __init__(self) -> None:
        super().__init__()
        self.generator = type(self).make()

    def forward(self, x: Tensor, generator: Any = None) -> Tensor:
        return self.own(x) * kept(self.generator if generator is None else generator, x.shape[-1])


def kept(generator: Any, count: int) -> Tensor:
    if isinstance(generator, torch.Generator):
        return torch.rand(count, generator=generator).round()
    return torch.tensor([float(round(generator.random())) for _ in range(count)])


GENERATORS = [
    lambda: torch.Generator().manual_seed(3),
    lambda: random.Random(3),
    lambda: numpy.random.default_rng(3),
    lambda: numpy.random.RandomState(3),
]


@pytest.mark.parametrize("activations", WAYS)
@pytest.mark.parametrize("make", GENERATORS, ids=["torch", "python", "numpy", "RandomState"])
@pytest.mark.parametrize("is_argument", [False, True])
def test_random_numbers_of_a_generator_are_drawn_once(
    tmp_path: Path, is_argument: bool, make: Any, activations: str
) -> None:
    def drive(layers: nn.ModuleList, x: Tensor) -> Tensor:
        generator = make() if is_argument else None
        for layer in layers:
            x = layer(x, generator)
        return x

    kind = type("Drawing", (Drawing,), {"make": staticmethod(make)})
    plain, offloaded = both(tmp_path, kind, drive, activations)
    expected = losses_of(plain, passes=2)
    assert losses_of(offloaded, passes=2) == expected
    assert len({*expected}) == 3


class Sharing(Drawing):
    """Has one generator as two attributes, and draws from the last two that it has or gets."""

    def __init__(self) -> None:
        super().__init__()
        self.same = self.generator

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        for generator in (self.generator, self.same, *given)[-2:]:
            x = x * (0.5 + kept(generator, x.shape[-1]))
        return self.own(x)


@pytest.mark.parametrize("activations", ["recompute", "host"])
@pytest.mark.parametrize("make", GENERATORS, ids=["torch", "python", "numpy", "RandomState"])
@pytest.mark.parametrize("given", ["attributes", "an attribute and an argument", "arguments"])
def test_a_generator_at_two_places_is_one_in_the_second_run(
    tmp_path: Path, given: str, make: Any, activations: str
) -> None:
    """Copied at each place by itself, it would draw the same numbers again at the second."""

    def drive(layers: nn.ModuleList, x: Tensor) -> Tensor:
        one = make()
        for layer in layers:
            own = layer.generator
            x = layer(x, *{"attributes": (), "arguments": (one, one)}.get(given, (own,)))
        return x

    kind = type("Sharing", (Sharing,), {"make": staticmethod(make)})
    plain, offloaded = both(tmp_path, kind, drive, activations)
    expected = losses_of(plain, passes=2)
    assert losses_of(offloaded, passes=2) == expected
    assert_same_gradients(offloaded, plain)


@pytest.mark.parametrize("is_argument", [False, True])
def test_the_default_generator_stays_that_which_dropout_draws_from(tmp_path: Path, is_argument: bool) -> None:
    class Dropping(Drawing):
        make = staticmethod(lambda: torch.default_generator)

        def forward(self, x: Tensor, *given: Any) -> Tensor:
            return nn.functional.dropout(super().forward(x, *given))

    def drive(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x, *([torch.default_generator] if is_argument else []))
        return x

    plain, offloaded = both(tmp_path, Dropping, drive, "recompute")
    expected = losses_of(plain, passes=2)
    assert losses_of(offloaded, passes=2) == expected
    assert_same_gradients(offloaded, plain)


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    ours = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(ours[name].grad, parameter.grad), name


class Masked(Layer):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.own(x) + torch.tanh(self.linear(x) + mask)


def growing_mask(layers: nn.ModuleList, x: Tensor) -> Tensor:
    mask = torch.zeros(LENGTH, SIZE)
    for number, layer in enumerate(layers):
        mask[number] = 1.0
        x = layer(x, mask)
    return x


@dataclass
class State:
    hidden: Tensor
    more: dict[str, Tensor] | None = None


@dataclass(slots=True)
class Slotted:
    hidden: Tensor


class OfState(Layer):
    def forward(self, state: Any) -> Any:
        state.hidden = self.own(state.hidden)
        return state.hidden


def states_that_are_written(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = x.clone()
        after = layer(State(x))
        x.zero_()
        x = after
    return x


@pytest.mark.parametrize("activations", WAYS)
@pytest.mark.parametrize(("kind", "drive"), [(Masked, growing_mask), (OfState, states_that_are_written)])
def test_an_input_that_is_written_later_is_refused_as_autograd_does(tmp_path, kind, drive, activations):
    plain, model = both(tmp_path, kind, drive, activations)
    has_copy = kind is OfState and activations in ("host", "disk")
    if activations == "keep" or has_copy:
        assert losses_of(model) == losses_of(plain)
    else:
        with pytest.raises(RuntimeError, match=WRITTEN):
            losses_of(model)


@pytest.mark.parametrize("activations", WAYS)
@pytest.mark.parametrize("state", [State, Slotted, lambda x: State(None, {"hidden": x})])
def test_what_a_layer_gets_may_be_in_an_object(tmp_path, state, activations):
    class Any_(OfState):
        def forward(self, given: Any) -> Any:
            return super().forward(given if given.hidden is not None else State(given.more["hidden"]))

    def drive(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(state(x))
        return x

    plain, model = both(tmp_path, Any_, drive, activations)
    assert losses_of(model) == losses_of(plain)


class Popping(Layer):
    def forward(self, x: Tensor, waiting: deque[float]) -> Tensor:
        return self.own(x * waiting.popleft())


class OwnDict(dict):
    __getattr__ = dict.__getitem__


class OfOwnDict(Layer):
    def forward(self, given: OwnDict) -> OwnDict:
        return OwnDict(x=self.own(given.x))


@pytest.mark.parametrize("activations", WAYS)
def test_containers_keep_their_class_and_what_they_held(tmp_path, activations):
    def popping(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x, deque([0.5, 2.0]))
        return x

    def owning(layers: nn.ModuleList, x: Tensor) -> Tensor:
        given = OwnDict(x=x)
        for layer in layers:
            given = layer(given)
        return given.x

    for kind, drive in (Popping, popping), (OfOwnDict, owning):
        plain, model = both(tmp_path, kind, drive, activations)
        assert losses_of(model) == losses_of(plain)
        stronghold.close(model)


class Sparse(Layer):
    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        return self.own(torch.stack([torch.sparse.mm(graph, one) for one in x.unbind(0)]))


@pytest.mark.parametrize("activations", WAYS)
def test_an_input_may_be_sparse(tmp_path, activations):
    graph = (torch.eye(LENGTH) * 0.5).to_sparse()

    def drive(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x, graph)
        return x

    plain, model = both(tmp_path, Sparse, drive, activations)
    assert losses_of(model) == losses_of(plain)


class Writing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.own(x)
        x.mul_(0.5)
        return y + x * self.bias


@pytest.mark.parametrize("activations", ["host", "disk"])
def test_an_input_that_the_second_run_writes_comes_up_again_for_another_pass(tmp_path, activations):
    def drive(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in [*layers][:2]:
            x = layer(x + 0)
        return x

    plain, model = both(tmp_path, Writing, drive, activations)
    assert losses_of(model, passes=2) == losses_of(plain, passes=2)


class Scaled(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.scaling, self.factors = {"default": 1.0}, [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x * self.scaling["default"] * self.factors[0])


@pytest.mark.parametrize("activations", WAYS)
def test_items_that_change_between_the_passes_are_those_of_the_first_run(tmp_path, activations):
    """PEFT's scale_layer and unscale_layer write into such a dictionary; diffusers calls them around a forward pass."""

    def change(model: nn.Module) -> None:
        for layer in model.layers:
            layer.scaling["default"] *= 1.5
            layer.factors[0] += 0.25

    plain, model = both(tmp_path, Scaled, one_after_another, activations)
    assert losses_of(model, between=change) == losses_of(plain, between=change)
    assert [layer.scaling for layer in model.layers] == [layer.scaling for layer in plain.layers]


class Counting(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return self.own(x - self.mean)


def test_a_layer_that_writes_its_buffers_is_refused_over_micro_batches(tmp_path):
    plain, model = both(tmp_path, Counting, one_after_another, "keep", micro_batch=2)
    with pytest.raises(ValueError, match=r"layers\.0, which writes its buffer mean .* offload without micro_batch"):
        losses_of(model)
    plain, model = both(tmp_path, Counting, one_after_another, "keep", micro_batch=SAMPLES)
    assert losses_of(model) == losses_of(plain)


def test_buffers_that_were_made_in_inference_are_no_matter_over_micro_batches(tmp_path):
    def made(model: nn.Module) -> nn.Module:
        with torch.inference_mode():
            for layer in model.layers:
                layer.register_buffer("angles", torch.ones(SIZE))
        return model

    plain, model = map(made, both(tmp_path, Layer, one_after_another, "recompute", micro_batch=2))
    assert losses_of(model) == pytest.approx(losses_of(plain), rel=1e-5)
