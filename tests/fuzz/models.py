"""Models of every feature: a row of layers of many kinds between two root modules, called in many orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.plainly import Plainly
from tests.small import SIZE, Attention, Block, Counting, Experts, Normed, Recurrent, Scale, Shift, Spectral, Stateful

LENGTH = 3


class Beside(nn.Module):
    """Parameters that are parts of one piece of memory, of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(SIZE * SIZE + SIZE + 3).mul(0.2)
        self.weight = nn.Parameter(memory[3 : 3 + SIZE * SIZE].view(SIZE, SIZE))
        self.bias = nn.Parameter(memory[3 + SIZE * SIZE :])
        self.tiny = nn.Parameter(memory[:3])

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(nn.functional.linear(x, self.weight, self.bias)) * self.tiny.sum()


class Stacked(nn.Module):
    """Parameters whose gradients share memory: autograd gives each the same."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(SIZE).mul(0.3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.stack(list(self.parts)).sum(0)


def _odd() -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, 7), nn.Tanh(), nn.Linear(7, SIZE, bias=False))


KINDS: dict[str, Callable[[float], nn.Module]] = {
    "linear": lambda dropout: nn.Linear(SIZE, SIZE),
    "block": lambda dropout: Block(SIZE, dropout),
    "odd": lambda dropout: _odd(),
    "scale": lambda dropout: Scale(SIZE),
    "shift": lambda dropout: Shift(SIZE),
    "beside": lambda dropout: Beside(),
    "stacked": lambda dropout: Stacked(),
    "bare": lambda dropout: nn.Tanh(),
    "attention": lambda dropout: Attention(0),
    "recurrent": lambda dropout: Recurrent(SIZE, SIZE),
    "normed": lambda dropout: Normed(),
    "stateful": lambda dropout: Stateful(),
    "counting": lambda dropout: Counting(),
    "experts": lambda dropout: Experts(),
    "spectral": lambda dropout: Spectral(),
}
FP32_ALONE = ("normed", "stateful", "spectral", "recurrent")
"""Kinds whose fp32 buffers or kernels take no bf16 inputs in plain PyTorch either."""
ORDERS = ("once", "twice", "skipping", "turning", "branches")
OUTPUTS = ("tensor", "tuple", "dict")


class Layer(nn.Module):
    """One layer of a kind, and how it returns: a tensor, a tuple, or a dictionary."""

    def __init__(self, inner: nn.Module, outputs: str) -> None:
        super().__init__()
        self.inner = inner
        self.outputs = outputs

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        if self.outputs == "tensor":
            return y
        aside = y.mean() * 0.1
        return (y, aside) if self.outputs == "tuple" else {"x": y, "aside": aside}


class Row(nn.Module):
    """Root parameters (one of them a scalar) around a row of layers; returns its features."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.order = model.order
        self.into = nn.Linear(SIZE, SIZE)
        self.layers = nn.ModuleList(Layer(KINDS[kind](model.dropout), model.outputs) for kind in model.layers)
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.out = nn.Linear(SIZE, SIZE)
        if model.tied:
            self.out.weight = self.into.weight

    def forward(self, x: Tensor, call: int = 0) -> Tensor:
        x = self.into(x.to(self.gain.dtype))
        if self.order == "branches":
            return self._through(x, call) + self._through(x.flip(0), call)
        return self._through(x, call)

    def _through(self, x: Tensor, call: int) -> Tensor:
        beside = x.new_zeros(())
        for layer in self._called(call):
            y = layer(x)
            if isinstance(y, dict):
                y = (y["x"], y["aside"])
            if isinstance(y, tuple):
                y, aside = y
                beside = beside + aside
            x = y
        return self.out(x) * self.gain + beside

    def _called(self, call: int) -> Iterator[nn.Module]:
        layers = list(self.layers)
        if self.order == "twice":
            layers = layers * 2
        elif self.order == "skipping" and len(layers) > 1:
            del layers[call % len(layers)]
        elif self.order == "turning" and call % 2:
            layers.reverse()
        return iter(layers)


@dataclass(frozen=True, kw_only=True, repr=False)
class Model(Plainly):
    """What a model is made of. ``shared`` gives the last layer the parameter of the first of its kind."""

    layers: tuple[str, ...] = ("linear", "linear")
    order: str = "once"
    outputs: str = "tensor"
    dropout: float = 0.0
    tied: bool = False
    shared: bool = False
    frozen: tuple[int, ...] = ()

    def build(self, seed: int = 0) -> Row:
        torch.manual_seed(seed)
        row = Row(self)
        if self.shared:
            _share(row)
        for number in self.frozen:
            row.layers[number % len(row.layers)].requires_grad_(False)
        return row


def _share(row: Row) -> None:
    """Lets the last layer have its first matrix from the first layer that has one of its shape."""
    *others, last = row.layers
    for name, parameter in last.named_parameters():
        for layer in others:
            there = dict(layer.named_parameters()).get(name)
            if parameter.ndim == 2 and "original" not in name and there is not None and there.shape == parameter.shape:
                path, _, own = name.rpartition(".")
                setattr(last.get_submodule(path), own, there)
                return


def batch(number: int) -> Tensor:
    """Returns the inputs of this number: as many samples as it says, always the same."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2 + number % 3, LENGTH, SIZE, generator=generator)
