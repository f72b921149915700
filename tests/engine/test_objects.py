"""What a layer keeps in objects and queues of its own, such as a sampler's count, is put back for its second run."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import stronghold
from stronghold.engine.places import ModulePlaces
from stronghold.engine.replay import State
from stronghold.errors import OffloadedModelError
from tests.adapters import SHAPE, adapted
from tests.small import SIZE

WAYS = ["recompute", "keep", "host", "disk"]


class Sampler:
    """Draws beforehand, and gives one after the other."""

    def __init__(self) -> None:
        self.next, self.given, self.generator = 0, [0.0], Random(3)

    def refill(self) -> None:
        self.noise, self.next = [*torch.randn(2, SIZE)], 0

    def get(self) -> Tensor:
        if self.next % 2 == 0:
            self.refill()
        self.next += 1
        self.given.append(self.generator.random())
        return self.noise[self.next - 1] * self.given[-1] * len(self.given)


class Sampling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.sampler = nn.Linear(SIZE, SIZE), Sampler()
        self.last, self.calls, self.seen = deque([0.0], maxlen=3), Counter[int](), defaultdict[int, int](int)

    def forward(self, x: Tensor) -> Tensor:
        self.last.append(self.last[-1] + 0.5)
        self.calls[len(x)] += 1
        self.seen[len(x)] += 1
        x = x * (self.last[0] + self.calls[len(x)] + self.seen[len(x)])
        return torch.tanh(self.linear(x) + self.sampler.get())


class Context:
    """What a model tells its layers beside their arguments."""

    scale: float
    mask: Tensor


class Told(nn.Module):
    def __init__(self, context: Context) -> None:
        super().__init__()
        self.linear, self.context = nn.Linear(SIZE, SIZE), context

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x * self.context.mask) * self.context.scale)


class Row(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module], context: Context | None = None) -> None:
        super().__init__()
        self.context = context
        self.layers = nn.ModuleList(layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.context is not None:
            self.context.scale, self.context.mask = float(x[0, 0]), x > 0
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Memory:
    """What layers pass on beside their outputs, with its graph."""

    def __init__(self) -> None:
        self.last: Any = torch.zeros(3, SIZE)
        self.seen: Any = []
        self.named: dict[str, Any] = {}


class Remembering(nn.Module):
    """Reads what the layers before have left, and a layer's own of the pass before; replaces all of it."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.linear, self.memory, self.own = nn.Linear(SIZE, SIZE), memory, None

    def forward(self, x: Tensor) -> Tensor:
        before = self.memory.last + sum(one * one for one in self.memory.seen) + self.memory.named.get("x", x).sin()
        y = torch.tanh(self.linear(x) * before if self.own is None else self.linear(x * self.own.cos()) * before)
        self.memory.last, self.own = y.exp(), y
        self.memory.seen.append(y)
        self.memory.named["x"] = y * 2
        return y


class Remembered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()
        self.layers = nn.ModuleList(Remembering(self.memory) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        self.memory.__init__()  # type: ignore[misc]
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() + 0.1 * sum(one.mean() for one in self.memory.seen)


def of_a_memory() -> nn.Module:
    return Remembered()


def of_samplers() -> nn.Module:
    return Row(Sampling)


def of_a_context() -> nn.Module:
    context = Context()
    return Row(lambda: Told(context), context)


def train(model: nn.Module, steps: int = 3) -> list[float]:
    """Trains by two forward passes under one loss."""
    torch.manual_seed(0)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        loss = model(torch.randn(3, SIZE)) + model(torch.randn(3, SIZE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        for layer in model.layers:  # type: ignore[union-attr]
            layer.own = None  # type: ignore[union-attr]
    return losses


def offloaded(model: nn.Module, tmp_path: Path, activations: str, window: int) -> nn.Module:
    store = tmp_path / "store" if activations == "disk" else "ram"
    return stronghold.offload(model, device="cpu", window=window, activations=activations, store=store)


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("activations", WAYS)
@pytest.mark.parametrize("build", [of_samplers, of_a_context, of_a_memory])
@pytest.mark.parametrize("window", [1, 2])
def test_layers_train_to_the_bit(tmp_path: Path, build: Any, activations: str, window: int) -> None:
    torch.manual_seed(1)
    plain = build()
    torch.manual_seed(1)
    model = offloaded(build(), tmp_path, activations, window)
    assert train(model) == train(plain)
    assert_same(model, plain)
    if build is of_samplers:
        for one, other in zip(model.layers, plain.layers, strict=True):
            assert (one.sampler.next, one.sampler.given) == (other.sampler.next, other.sampler.given)
            assert (one.last, one.calls, one.seen) == (other.last, other.calls, other.seen)


@pytest.mark.parametrize("activations", WAYS)
def test_monte_carlo_lora_trains_to_the_bit(tmp_path: Path, activations: str) -> None:
    """PEFT's sampler is an object, not a module, and counts which of its draws is the next."""
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], monteclora_config=peft.MontecloraConfig(buffer_size=2)
    )
    ids = torch.randint(0, SHAPE["vocab_size"], (3, 2, 8), generator=torch.Generator().manual_seed(2))
    ends = []
    for way in [None, activations]:
        model = adapted(config, torch.float32)
        if way is not None:
            model = offloaded(model, tmp_path, way, 1)
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses = []
        for batch in ids:
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        ends.append((losses, model))
    (expected, plain), (losses, model) = ends
    assert losses == expected
    assert_same(model, plain)


class Slotted:
    __slots__ = ("count",)


def ran(module: nn.Module) -> State:
    state = State(ModulePlaces(module))
    state.ran()
    return state


def test_what_the_user_writes_in_an_object_is_put_back_and_the_object_is_not_held() -> None:
    module = nn.Linear(2, 2)
    module.context = context = Context()  # type: ignore[assignment]
    module.also, module.slotted = context, Slotted()  # type: ignore[assignment]
    context.scale, context.mask = 1.0, torch.ones(2)
    context.owner = module  # type: ignore[attr-defined]
    state, mask = ran(module), context.mask
    context.scale, context.mask = 2.0, torch.zeros(2)
    with state.again():
        assert context.scale == 1.0
        assert context.mask is mask
    assert context.scale == 2.0
    module.context = module.also = other = Context()  # type: ignore[assignment]
    del context
    with (
        pytest.raises(OffloadedModelError, match=r"attribute (context|also) of a Linear has been replaced"),
        state.again(),
    ):
        pass
    assert module.context is other  # type: ignore[comparison-overlap]


def test_what_is_written_into_an_object_s_tensors_is_left_to_the_user() -> None:
    """Copies of them would be memory that nobody has counted: a quantised weight's scales are in an object."""
    module = nn.Linear(2, 2)
    module.context = context = Context()  # type: ignore[assignment]
    context.mask = torch.ones(2)
    state = ran(module)
    context.mask.zero_()
    with state.again():
        assert not context.mask.any()
