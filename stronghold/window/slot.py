"""A device buffer that layers pass through, with the tensors that were made over it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from stronghold.device import Event
from stronghold.unit import Unit


@dataclass
class Slot:
    """A fixed device buffer that holds one layer at a time."""

    flat: Tensor
    ready: Event | None = None
    """The fetch of the layer it holds."""
    read: Event | None = None
    """The end of the last computation with the layer it held, or with what was in its memory before."""
    views: dict[int, list[Tensor]] = field(default_factory=dict)
    wholes: dict[int, Tensor] = field(default_factory=dict)
    """All bytes of a layer that it has held."""
    as_dtype: dict[torch.dtype, Tensor] = field(default_factory=dict)
    begin: int = field(init=False)
    """The address of its first byte."""

    @property
    def tensors(self) -> list[Tensor]:
        """All that the engine itself has over its memory."""
        views = [view for views in self.views.values() for view in views]
        bases = [view._base for view in views if view._base is not None]
        return [self.flat, *self.wholes.values(), *self.as_dtype.values(), *views, *bases]

    def __post_init__(self) -> None:
        self.begin = self.flat.data_ptr()


def lies_in(slots: Sequence[Slot], tensor: Tensor) -> bool:
    """Whether a tensor on the slots' device lies in one of them."""
    if tensor.layout != torch.strided or not torch._C._has_storage(tensor):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        address = tensor.data_ptr()
    return any(slot.begin <= address < slot.begin + slot.flat.numel() for slot in slots)


def kept_by_another(slot: Slot, unit: Unit) -> Tensor | None:
    """Returns a tensor over a slot, which holds ``unit``, that another has, as far as Python knows of one.

    No generator: among all objects it would find itself, and stay in the middle until the garbage collector comes.
    """
    own = {*map(id, slot.tensors), *map(id, unit.parameters)}
    with torch._C.DisableTorchFunctionSubclass():
        for found in gc.get_objects():
            if type(found) not in (Tensor, nn.Parameter) or id(found) in own or found.device != slot.flat.device:
                continue
            if lies_in([slot], found):
                memory, begin = found.untyped_storage()._cdata, found.data_ptr() - slot.begin
                fetched = (begin, found.nbytes) == (0, unit.layout.total_bytes)
                if memory == slot.flat.untyped_storage()._cdata and not fetched:
                    return found
    return None
