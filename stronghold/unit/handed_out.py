"""What replicas have in common, and one of them has handed out: that its user has not written it."""

from __future__ import annotations

import torch
from torch import Tensor

from stronghold.errors import OffloadedModelError
from stronghold.unit.computed_with import digest


class HandedOut:
    """Digests of a unit's weights and gradients, taken before the user gets memory of theirs, by index.

    A write there leaves no trace but in the values, and each replica's would come on top of the others'.
    """

    def __init__(self) -> None:
        self._digests: dict[tuple[bool, int], tuple[Tensor, Tensor]] = {}

    def note(self, index: int, values: Tensor, *, of_gradient: bool = False) -> None:
        """Called before the user may write ``values``."""
        if (of_gradient, index) not in self._digests:
            self._digests[of_gradient, index] = values, digest(values)

    def check(self, name: str, *, gradients: bool) -> None:
        """Raises OffloadedModelError where weights of the unit ``name`` were written, or ``gradients`` too.

        A gradient may be, once a step has used it: it may be cleared so.
        """
        for (of_gradient, _), (values, known) in self._digests.items():
            if (gradients or not of_gradient) and not torch.equal(digest(values), known):
                raise OffloadedModelError(
                    f"replicas have the weights and gradients of {name} in common, or must have them alike, so that "
                    f"none may write them by itself (got a {'gradient' if of_gradient else 'weight'} of shape "
                    f"{list(values.shape)} that was written through its data, a view or an array); change weights "
                    "before the model is offloaded, update by stronghold.AdamW, and clip by its max_grad_norm="
                )

    def forget(self) -> None:
        """Called before replicas change it together."""
        self._digests.clear()
