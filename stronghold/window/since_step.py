"""What ``update="in_backward"`` has updated since the last step, and whether the step may still come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stronghold.errors import OffloadedModelError
from stronghold.unit import Consumed, ConsumedGradient, HostGrad, Unit, gradient_of

Settings = list[dict[str, Any]]
"""An optimizer's, of each of its groups."""

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
        self._settings: Settings = []
        """The optimizer's, with which the first layer since the last step was updated."""

    def note(self, unit: Unit, gradients: Mapping[int, HostGrad], settings: Callable[[], Settings]) -> None:
        """Called when the update of a layer with ``gradients``, by index, is to be submitted.

        ``settings`` tells with which of the optimizer, which are the same until ``step()``.
        """
        assert unit.layer is not None
        if not self._updated:
            self._settings = settings()
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

    def check_step(self, updates: Callable[[Unit, int], bool], settings: Settings) -> None:
        """Raises OffloadedModelError where a gradient is used up, but not by an update since the last step.

        Raises it, too, where the ``settings`` are no longer those that layers were updated with. ``updates`` tells of
        which parameters, by unit and index, the step is.
        """
        if self._updated and settings != self._settings:
            raise OffloadedModelError(
                "update='in_backward' updates layers in the backward pass, with the settings that the optimizer has "
                f"there, and step() needs the same (got {_changes(self._settings, settings)}); set them before "
                "backward(), or use update='deferred'"
            )
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


def _changes(before: Settings, now: Settings) -> str:
    """Returns which setting of the first group that differs is another, in the backward pass and now."""
    if len(before) != len(now):
        return f"{len(before)} groups and {len(now)}"
    number = next(i for i, group in enumerate(now) if group != before[i])
    was, found = before[number], now[number]
    name = next(name for name in {**was, **found} if was.get(name) != found.get(name))
    return f"{name} {was.get(name)!r} in backward() and {found.get(name)!r} in step(), in group {number}"


def _names(units: Sequence[Unit]) -> str:
    names = sorted(dict.fromkeys(units), key=lambda unit: unit.layer or 0)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(unit.name for unit in names[:_NAMED]) + more
