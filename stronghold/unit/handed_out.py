"""What replicas have in common, and one of them has handed out: that its user has not written it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stronghold.errors import OffloadedModelError
from stronghold.unit.computed_with import digest

if TYPE_CHECKING:
    from stronghold.unit.unit import Unit


def common_error(replicas: int, name: str) -> OffloadedModelError:
    """Returns the error for one of so many ``replicas`` that would write the unit ``name``."""
    return OffloadedModelError(
        f"{replicas} replicas have the weights and gradients of {name} in common, or must "
        "have them alike, so that none may write them by itself; change weights before the model is offloaded, "
        "update by stronghold.AdamW, clip by its max_grad_norm=, load by checkpoint.load, zero_grad() to None"
    )


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

    def check_weights(self, unit: Unit) -> None:
        """Does so for its weights, and goes on with those that the user still holds: no update writes them now."""
        if unit.replicas.world_size == 1:
            return
        self.check(unit.name, gradients=False)
        held = [index for index in range(len(unit.weight)) if unit.is_aliased_at(index)]
        for key in [key for key in self._digests if not key[0] and key[1] not in held]:
            del self._digests[key]
        for index in held:
            self.note(index, (unit.on_device or unit.weight)[index])

    def forget(self, *, weights: bool = True) -> None:
        """Called before replicas change the gradients together, and the ``weights``."""
        self._digests = {} if weights else {key: known for key, known in self._digests.items() if not key[0]}
