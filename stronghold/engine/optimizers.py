"""The optimizers of stronghold's that update one model: one, or several with parameters of their own each."""

from __future__ import annotations

import gc
import weakref

from stronghold.errors import OffloadedModelError
from stronghold.optim import HostAdamW


class Optimizers:
    """Refers to them weakly, in the order in which they were made: each is there as long as its user has it."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[HostAdamW]] = []

    def _alive(self) -> list[HostAdamW]:
        return [optimizer for reference in self._made if (optimizer := reference()) is not None]

    def newest(self) -> HostAdamW | None:
        """The one that was made last of those that are there."""
        return next((optimizer for made in reversed(self._made) if (optimizer := made()) is not None), None)

    def others(self, optimizer: HostAdamW) -> list[HostAdamW]:
        """Returns those that are there beside ``optimizer``."""
        return [one for one in self._alive() if one is not optimizer]

    def others_have_states(self, optimizer: HostAdamW) -> bool:
        """Whether one of those beside ``optimizer`` has states; waits for its updates."""
        if not any(any(one.state.values()) for one in self.others(optimizer)):
            return False
        gc.collect()  # one that is gone may have parameter groups that refer to one another
        return any(any(one.state.values()) for one in self.others(optimizer))

    def add(self, optimizer: HostAdamW) -> None:
        """Notes one more; raises OffloadedModelError where the backward pass could not tell which of two updates."""
        if self._collide(optimizer):
            gc.collect()  # one that is gone may have parameter groups that refer to one another
        if self._collide(optimizer):
            raise OffloadedModelError(
                "update='in_backward' needs the model's only optimizer, because the backward pass itself updates (got "
                "a second one); delete the first, or use update='deferred'"
            )
        self._made = [weakref.ref(one) for one in (*self._alive(), optimizer)]

    def _collide(self, optimizer: HostAdamW) -> bool:
        known = self._alive()
        return bool(known) and any(one.in_backward for one in (*known, optimizer))

    def forget(self) -> None:
        """Gives back what all of them hold: called when the model is closed."""
        for optimizer in self._alive():
            optimizer.forget()
