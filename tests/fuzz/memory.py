"""Operations that write parameters, by every way there is, and that hold on to their memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.operation import Operation
from tests.fuzz.twin import Twin


def _first(tensor: Tensor) -> Tensor:
    """Returns a view of a part of a tensor, or of all."""
    return tensor[:1] if tensor.ndim else tensor


def _set_data(twin: Twin, name: str, parameter: Tensor, factor: float) -> None:
    if twin.plain:  # an offloaded one keeps its memory, and so do those who hold it
        parameter.data.mul_(factor)
    else:
        parameter.data = parameter.data * factor


def _fused(twin: Twin, name: str, parameter: Tensor, factor: float) -> None:
    settings = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": True}
    torch._fused_sgd_([parameter], [torch.full_like(parameter, 1 - factor)], [], **settings, **flags)  # type: ignore


def _copied_over(twin: Twin, name: str, parameter: Tensor, factor: float) -> None:
    value = (parameter.detach().clone() * factor).contiguous()
    if parameter.is_contiguous():
        ctypes.memmove(parameter.data_ptr(), value.data_ptr(), value.numel() * value.element_size())
    else:
        parameter.copy_(value)


def _by_numpy(twin: Twin, name: str, parameter: Tensor, factor: float) -> None:
    if parameter.dtype == torch.float32:
        array = parameter.detach().numpy()
        array *= factor


def _foreach(twin: Twin, name: str, parameter: Tensor, factor: float) -> None:
    some = [p for _, p in twin.parameters() if p is parameter or p.ndim == 1]
    torch._foreach_mul_(some, factor)


def _vector(twin: Twin, name: str, parameter: Tensor, factor: float) -> None:
    for p in (parameter,):  # vector_to_parameters, which sets p.data
        lying = p if p.is_contiguous() else p.contiguous()  # others it refuses in plain PyTorch
        vector = nn.utils.parameters_to_vector([lying]).detach() * factor
        if not twin.plain:
            nn.utils.vector_to_parameters(vector, [p])
        else:
            p.copy_(vector.view_as(p))


def _init(twin: Twin, name: str, parameter: Tensor, factor: float) -> None:
    if "scale" in twin.program.model.layers:  # a transposed parameter is filled in the order of its memory
        parameter.copy_(nn.init.normal_(torch.empty(parameter.shape), std=0.1))
    else:
        nn.init.normal_(parameter, std=0.1)


WRITES: dict[str, Callable[[Twin, str, Tensor, float], Any]] = {
    "mul_": lambda t, n, p, f: p.mul_(f),
    "copy_": lambda t, n, p, f: p.copy_(p.clone() * f),
    "index": lambda t, n, p, f: p.__setitem__(..., p * f),
    "data.mul_": lambda t, n, p, f: p.data.mul_(f),
    "data": _set_data,
    "data[]": lambda t, n, p, f: p.data.__setitem__(..., p.data * f),
    "detach": lambda t, n, p, f: p.detach().mul_(f),
    "view": lambda t, n, p, f: _first(p).mul_(f),
    "detached view": lambda t, n, p, f: _first(p.detach()).mul_(f),
    "load_state_dict": lambda t, n, p, f: t.model.load_state_dict({n: p * f}, strict=False),
    "state_dict": lambda t, n, p, f: t.model.state_dict()[n].mul_(f),
    "init": _init,
    "out": lambda t, n, p, f: torch.mul(p.clone(), f, out=p),
    "foreach": _foreach,
    "numpy": _by_numpy,
    "vector": _vector,
    "memmove": _copied_over,
    "fused": _fused,
}
SEEN = ("mul_", "copy_", "index", "load_state_dict", "init", "out", "data", "vector")
"""What counts element by element in bf16."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Write(Operation):
    """Multiplies a parameter by ``factor``, or where the way has no such thing writes something like it."""

    loosens = True
    how: str = "mul_"
    target: int = 0
    factor: float = 0.5

    def run(self, twin: Twin) -> Any:
        name, parameter = twin.target(self.target)
        with torch.no_grad():
            WRITES[self.how](twin, name, parameter, self.factor)

    def is_seen(self) -> bool:
        return self.how in SEEN


HOLDS: dict[str, Callable[[Twin, str, Tensor], Any]] = {
    "data": lambda t, n, p: p.data,
    "detach": lambda t, n, p: p.detach(),
    "view": lambda t, n, p: _first(p.detach()),
    "state_dict": lambda t, n, p: t.model.state_dict(),
    "numpy": lambda t, n, p: p.detach().numpy() if p.dtype == torch.float32 else p.detach(),
    "gradient": lambda t, n, p: p.grad,
    "gradients": lambda t, n, p: [q.grad for _, q in t.parameters()],
    "loss": lambda t, n, p: t.loss(0),
}


@dataclass(frozen=True, kw_only=True, repr=False)
class Hold(Operation):
    """Keeps something of the model, by which its memory can be read and written later, or its graph lives on."""

    loosens = True
    what: str = "data"
    target: int = 0

    @property
    def parts(self) -> bool:  # type: ignore[override]
        return self.what.startswith("gradient")

    def run(self, twin: Twin) -> Any:
        name, parameter = twin.target(self.target)
        twin.held.append((self.what, HOLDS[self.what](twin, name, parameter), self.target))


def _tensors(what: str, thing: Any) -> list[Tensor]:
    if what == "state_dict":
        return [value for value in thing.values() if value.is_floating_point()]
    if what == "numpy" and not isinstance(thing, Tensor):
        return [torch.from_numpy(thing)]
    things = thing if isinstance(thing, list) else [thing]
    return [value for value in things if isinstance(value, Tensor)]


@dataclass(frozen=True, kw_only=True, repr=False)
class Held(Operation):
    """Reads, writes or drops one of the things that are held."""

    loosens = True
    how: str = "read"
    which: int = -1
    target: int = 0
    factor: float = 0.5

    def run(self, twin: Twin) -> Any:
        if not twin.held:
            return None
        which = self.which % len(twin.held)
        what, thing, _ = twin.held[which]
        if self.how == "drop":
            del twin.held[which]
            return None
        if self.how == "read" or what in ("loss", "output"):
            return [value.detach().clone() for value in _tensors(what, thing)]
        if tensors := _tensors(what, thing):
            with torch.no_grad():
                tensors[self.target % len(tensors)].mul_(self.factor)
        return None
