"""A device buffer that layers pass through, with the tensors that were made over it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from stronghold.device import Event


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
