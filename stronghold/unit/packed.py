"""Quantised weights of all kinds: their parameters, what of them stays on the device, and which are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.unit.eight_bits import EightBits
from stronghold.unit.four_bits import FourBits
from stronghold.unit.quantised import PackedPart, Packing, cell_parameter, part_of
from stronghold.unit.tensor_subclasses import TensorSubclasses

_KINDS: tuple[Packing, ...] = (FourBits(), EightBits(), TensorSubclasses())


def is_packed(parameter: Tensor) -> bool:
    """Whether ``parameter`` is a quantised weight, or a part of one: it computes in its own dtype."""
    return part_of(parameter) is not None or _kind_of(parameter) is not None


def all_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields what of ``module`` moves: its parameters, and those that quantised weights consist of.

    Names are those of ``named_parameters()``; the parts of a quantised weight have names behind it, with its type, by
    which a checkpoint of another type is refused. Tensors that a weight consists of become parameters, so that they
    move by their ``data``, as all do.
    """
    for name, parameter, _ in parameters_and_owners(module):
        yield name, parameter


def parameters_and_owners(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
    """Yields the same, with the parameter of a module that each is, or is a part of."""
    seen: set[int] = set()
    for prefix, holder in module.named_modules():
        for own, parameter in holder._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                for name, part in parts_of(holder, own, parameter):
                    yield f"{prefix}.{name}" if prefix else name, part, parameter


def parts_of(holder: nn.Module, own: str, parameter: nn.Parameter) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields what of one parameter moves, which ``holder`` has by the name ``own``, by its name there."""
    kind = _kind_of(parameter)
    if kind is None:
        yield own, parameter
        return
    title, kept, count = kind.title(parameter), kind.may_be_kept, _count(kind, parameter)
    if kind.moves_itself(parameter):
        parameter.__dict__["_part"] = PackedPart(title, kept, count)
        count = 0
        yield own, parameter
    for cell in kind.cells(holder, parameter):
        part = cell_parameter(cell)
        part.__dict__["_part"] = PackedPart(title, kept, count)
        count = 0
        yield f"{own}.{cell.own}", part


def stand_in(parameter: Tensor) -> Tensor:
    """Returns what tells of a parameter where it lives: itself, or the first cell of a weight without own memory."""
    kind = _kind_of(parameter)
    if kind is None or kind.moves_itself(parameter):
        return parameter
    cell = next(kind.cells(nn.Module(), parameter))
    found: Tensor = getattr(cell.holder, cell.name)
    return found


def settle(module: nn.Module, device: torch.device) -> None:
    """Moves what of the quantised weights in ``module`` is the same for all to the device, where it stays.

    Has their modules save what a backward pass needs as autograd knows, so that the window does, too.
    """
    for inner in module.modules():
        for parameter in inner._parameters.values():
            if parameter is not None and (kind := _kind_of(parameter)) is not None:
                kind.settle(inner, parameter, device)


def check_packed(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Raises ValueError for quantised weights that are asked to train, or cannot be computed with on ``device``.

    All other weights are to compute in ``dtype``, or None for their own. Has modules compute with the bytes as they
    are.
    """
    for prefix, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is None or (kind := _kind_of(parameter)) is None:
                continue
            name = f"{prefix}.{own}" if prefix else own
            kind.check(name, module, parameter, device, dtype)
            if parameter.requires_grad:
                raise ValueError(
                    f"a quantised weight cannot be trained (got {name} with requires_grad); freeze it, and train "
                    "adapters beside it (peft.get_peft_model)"
                )


def unpacked(tensor: Tensor) -> Tensor | None:
    """Returns what stands for a quantised weight as it was before, on the meta device; any other tensor itself.

    None where nothing here can quantise values for it.
    """
    kind = _kind_of(tensor)
    return tensor if kind is None else kind.unpacked(tensor)


def count_of(parameter: Tensor) -> int:
    """Returns how many numbers of the model a parameter holds: of a quantised weight the first part holds all."""
    part = part_of(parameter)
    return parameter.numel() if part is None else part.count


def pack(weight: Any, value: Tensor) -> Iterator[Tensor]:
    """Yields the bytes of a quantised weight that is to hold ``value``, and its cells in their order."""
    kind = _kind_of(weight)
    assert kind is not None
    return kind.pack(weight, value)


def copy_of(weight: nn.Parameter, own: Any, memo: dict[int, Any]) -> nn.Parameter:
    """Returns a copy of a quantised weight that moves itself, whose class was ``own``, with copies of its cells."""
    kind = _kind_of(weight)
    assert kind is not None
    return kind.copy(weight, own, memo)


def _kind_of(parameter: Tensor) -> Packing | None:
    return next((kind for kind in _KINDS if kind.has(parameter)), None)


def _count(kind: Packing, parameter: Tensor) -> int:
    before = kind.unpacked(parameter)
    return (parameter if before is None else before).numel()


class StaysInPlace(nn.Parameter):
    """A quantised weight that is itself where it is asked to be where it is.

    bitsandbytes makes another of it, and PEFT puts that into its place after it has looked at the values (DoRA, on the
    CPU): the window would not know it.
    """

    def to(self, *args: Any, **kwargs: Any) -> Any:
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device in (None, self.device) and dtype in (None, self.dtype):
            return self
        return super().to(*args, **kwargs)
