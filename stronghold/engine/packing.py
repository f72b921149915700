"""What autograd keeps of a layer's run: tensors in the layer's slot by their place, to be fetched again, others as are.

Autograd calls these functions for some two dozen tensors of a transformer's layer, in each pass: what most of them
take is written out here, and calls no other function of Python's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from stronghold.engine.saved import Saved
from stronghold.errors import OffloadedModelError
from stronghold.unit import as_written, opaque
from stronghold.window import Activations, KeptInput, Window


class Run:
    """One run of a layer in a forward pass; it lives as long as autograd may come back to it."""

    def __init__(self, layer: int, generation: int, batch: int) -> None:
        self.layer = layer
        self.generation = generation
        self.batch = batch
        """How many samples the layer's input has."""


def no_run() -> Run | None:
    """Stands for a weak reference to a run where there is none."""
    return None


class SlotTensor(NamedTuple):
    """Stands for a saved tensor that lies in a slot, ``offset`` elements behind its beginning: fetched again."""

    run: Run
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Fetches(Protocol):
    """Has what was saved on the device again."""

    window: Window
    activations: Activations | None

    def return_to(self, run: Run) -> None:
        """Opens the backward pass of the layer of ``run``, where it is not open."""


class Owner(Protocol):
    """Who computes the layer."""

    @property
    def engine(self) -> Fetches: ...


_T = TypeVar("_T")
_Owner = TypeVar("_Owner", bound=Owner)
_STRIDED, _has_storage, _make = torch.strided, torch._C._has_storage, tuple.__new__


@as_written
def pack(run: Run, begin: int, end: int, tensor: Tensor) -> SlotTensor | Saved:
    """Returns what stands for a saved tensor: ``begin`` and ``end`` are the addresses between which the layer lies."""
    if tensor.layout is _STRIDED and _has_storage(tensor):  # a sparse one has no memory of its own
        address = tensor.data_ptr()
        if begin <= address < end:
            offset = (address - begin) // tensor.element_size()
            return _make(SlotTensor, (run, tensor.dtype, offset, tensor.shape, tensor.stride()))
    kept = tensor if tensor.is_leaf else tensor.detach()  # as Saved.of
    return _make(Saved, (kept, 0 if kept.is_inference() else kept._version))


@opaque
def pack_on_host(
    run: Run, begin: int, end: int, send: Callable[[Tensor], KeptInput | None], tensor: Tensor
) -> SlotTensor | KeptInput | Saved:
    """Does the same, but for the layer's inputs, which ``send`` keeps on the host."""
    packed = pack(run, begin, end, tensor)
    return packed if type(packed) is SlotTensor else send(tensor) or packed


@as_written
def unpack(owner: weakref.ref[_Owner], layer: str, packed: SlotTensor | KeptInput | Saved) -> Tensor:
    """Returns the tensor that ``packed`` stands for."""
    if type(packed) is Saved:
        tensor, version = packed
        if (0 if tensor.is_inference() else tensor._version) == version:
            return tensor
    return _fetched(owner, layer, packed)


@opaque
def _fetched(owner: weakref.ref[_Owner], layer: str, packed: SlotTensor | KeptInput | Saved) -> Tensor:
    if isinstance(packed, Saved):
        return packed.value(layer)  # which raises
    engine = there(owner, layer).engine
    if isinstance(packed, KeptInput):
        assert engine.activations is not None
        return engine.activations.value(packed)
    engine.return_to(packed.run)
    return engine.window.part(packed.run.layer, *packed[1:])


@opaque
def pack_input(keep: Callable[[Tensor], KeptInput | None], tensor: Tensor) -> KeptInput | Saved:
    """Returns what stands for an input of a layer that is recomputed: ``keep`` keeps it on the host."""
    return keep(tensor) or Saved.of_input(tensor)


@opaque
def unpack_input(owner: weakref.ref[_Owner], layer: str, run: Run, packed: KeptInput | Saved) -> Tensor:
    """Returns the input."""
    if isinstance(packed, Saved):
        return packed.value(layer)
    engine = there(owner, layer).engine
    engine.return_to(run)  # the layer before is complete, and sends its gradients down before these come up
    assert engine.activations is not None
    return engine.activations.value(packed)


def there(reference: weakref.ref[_T], layer: str) -> _T:
    """Returns what autograd's graph refers to weakly."""
    if (found := reference()) is None:
        raise OffloadedModelError(
            f"a model must be there as long as it is computed with, in the backward pass too ({layer} is gone); keep "
            "the model until backward() has returned"
        )
    return found
