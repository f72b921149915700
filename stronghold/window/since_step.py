"""What ``update="in_backward"`` has updated since the last step, and whether the step may still come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from stronghold.errors import OffloadedModelError
from stronghold.unit import Consumed, ConsumedGradient, HostGrad, Unit, gradient_of

_NAMED = 4
"""How many layers an error names."""


class SinceStep:
    """The parameters that backward passes have updated, with the gradient of each, until ``step()`` ends that update.

    PyTorch updates nothing before ``step()``. Where the gradients of a parameter that is updated are dropped or
    replaced before it, as by a loop that tries again after a backward pass that failed, the model is no longer the one
    that PyTorch would have.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._updated: dict[tuple[int, int], Consumed | None] = {}

    def note(self, unit: Unit, gradients: Mapping[int, HostGrad]) -> None:
        """Called when the update of a layer with ``gradients``, by index, has been submitted."""
        assert unit.layer is not None
        self._updated.update({(unit.layer, index): gradient.consumed for index, gradient in gradients.items()})

    def clear(self) -> None:
        """Called when a step has ended the update, or other values were loaded into the model."""
        self._updated.clear()

    def check(self) -> None:
        """Raises OffloadedModelError where gradients that have updated a layer were dropped or replaced since.

        Called outside a backward pass, when the user sees its gradients.
        """
        dropped = [
            self._units[layer]
            for (layer, index), consumed in self._updated.items()
            if _consumed(self._units[layer], index) is not consumed
        ]
        if dropped:
            raise OffloadedModelError(
                "update='in_backward' has updated layers in a backward pass whose gradients were dropped or replaced "
                f"before step() (got {_names(dropped)} updated): the pass failed, or zero_grad() came first. The model "
                "is updated in part, and another pass would update it twice; load the last checkpoint into the model "
                "and the optimizer, or load the weights and make a new optimizer, or use update='deferred', which "
                "updates nothing before step()"
            )

    def check_saved(self) -> None:
        """Raises OffloadedModelError where a step has begun, and not ended."""
        if self._updated:
            units = [self._units[layer] for layer, _ in self._updated]
            raise OffloadedModelError(
                "a checkpoint must be of a whole step, and update='in_backward' has updated layers in a backward pass "
                f"whose step() has not come (got {_names(units)} updated): a run that goes on from it would update "
                "them twice; save behind step()"
            )

    def check_step(self, updates: Callable[[Unit, int], bool]) -> None:
        """Raises OffloadedModelError where a gradient is used up, but not by an update since the last step.

        ``updates`` tells of which parameters, by unit and index, the step is.
        """
        lost = [
            unit
            for layer, unit in enumerate(self._units)
            for index in range(len(unit.parameters))
            if (layer, index) not in self._updated and _consumed(unit, index) is not None and updates(unit, index)
        ]
        if lost:
            raise OffloadedModelError(
                "step() needs gradients of a backward pass since the last step, and those that update='in_backward' "
                f"has used up are not there for a second one, nor those of a pass that failed (got {_names(lost)}); "
                "call zero_grad() and backward() before step()"
            )


def _consumed(unit: Unit, index: int) -> Consumed | None:
    gradient = gradient_of(unit.parameters[index])
    return gradient._consumed if isinstance(gradient, ConsumedGradient) else None


def _names(units: Sequence[Unit]) -> str:
    names = sorted(dict.fromkeys(units), key=lambda unit: unit.layer or 0)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(unit.name for unit in names[:_NAMED]) + more
