"""AdamW's groups and states over the parameters of an offloaded model, and what a step updates."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.device import Device, check_process, forks
from stronghold.errors import NonFiniteGradientError, OffloadedModelError
from stronghold.optim.change import AdamWChange, Change
from stronghold.optim.groups import check_group, check_groups, units_of
from stronghold.optim.state_dicts import load, saved
from stronghold.optim.states import Moment, Moments, ParameterState, as_state
from stronghold.optim.threads import Threads
from stronghold.optim.update import CountedSteps, Update
from stronghold.settings import check_optimizer
from stronghold.unit import HostGrad, Need, Unit, check_room, closed_error, missing_remainders, unit_of


class HostAdamW(torch.optim.Optimizer):
    """Says what a step of :class:`stronghold.AdamW`, which is one, updates, and has its states; carries nothing out.

    ``defaults`` are what a group has that does not say otherwise; the other arguments are those of that class.
    """

    called = "AdamW"

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        states: str,
        max_grad_norm: float | None,
        update: str,
        nonfinite: str,
    ) -> None:
        check_optimizer(states, update, nonfinite, max_grad_norm)
        self.states = states
        self.max_grad_norm = max_grad_norm
        self.in_backward = update == "in_backward"
        self.nonfinite = nonfinite
        self.skipped_steps = 0
        self.kernel_threads = Threads(1)
        self.in_order: list[CountedSteps] = []
        """Updates of the backward pass that were issued to the device before the host saw their gradients."""
        self._owner: Any = None  # whose parameters these are: the same for all of them
        self._units: dict[Unit, None] = {}  # those of the parameters, each once
        self._closed = False
        self._born = forks()
        self._groups: dict[int, int] = {}
        self._moments = self._no_moments()
        self._checked = False
        """Whether the settings were checked since the last step."""
        self.check_group(defaults)
        super().__init__(params, defaults)

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The moments and steps, by parameter; waits for their updates. OffloadedModelError in a child of fork."""
        check_process(self._born)
        self.wait()
        return self._state

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        self._state = value

    def __getstate__(self) -> dict[str, Any]:
        raise OffloadedModelError(
            "an optimizer over an offloaded model cannot be copied or pickled, for it updates that model's own memory; "
            "copy or save its state_dict(), and load that into an optimizer over the other model"
        )

    def wait(self) -> None:
        """Blocks until every update under way is complete. Raises OffloadedModelError where the model was closed."""
        if self._closed:
            raise closed_error()
        for unit in self._units:
            unit.wait_on_host()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; its parameters must belong to the offloaded model of the others."""
        params = [given] if isinstance(given := param_group["params"], Tensor) else list(given)
        units = units_of(params, self._owner)
        self._units.update(dict.fromkeys(units))
        self._owner = units[0].owner if units else self._owner
        self.check_group({**self.defaults, **param_group})
        super().add_param_group({**param_group, "params": params})
        for parameter in self.param_groups[-1]["params"]:
            self._groups[id(parameter)] = len(self.param_groups) - 1

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in ``torch.optim.AdamW``'s format; 8-bit moments as copies in fp32."""
        return saved(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dictionary of this class or of ``torch.optim.AdamW``.

        Moments keep their fp32 values, whatever the parameters' dtype. Raises ValueError for one of another shape or
        format, before anything has changed.
        """
        self._check_open()
        load(self, state_dict)

    def groups_from(self, saved_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns the groups of a state dictionary that was checked as this optimizer is to have them."""
        return [{**group} for group in saved_groups]

    def moments_of(self, unit: Unit, index: int) -> tuple[Moment, ...]:
        """Returns the memory for the moments of a parameter, which are to be written."""
        return self._moments.of(unit, index)

    def restart(self, steps: Mapping[Tensor, float], *, zeroed: bool = True) -> None:
        """Replaces all states: the parameters of ``steps`` have one, at that step, whose moments the caller fills.

        The memory for those of the others is all zero if it was not used before, unless ``zeroed`` is False.
        Raises BudgetError where they do not fit, before anything has changed.
        """
        self._check_open()
        placed = [(p, unit, p.__dict__["_index"]) for p in steps if (unit := unit_of(p)) is not None]  # type: ignore[arg-type]
        missing: dict[Unit, list[int]] = {}
        for _, unit, index in placed:
            missing.setdefault(unit, []).append(index)
        self.provide(missing)
        self.wait()
        self._state = defaultdict(dict)
        for parameter, unit, index in placed:
            self._state[parameter] = as_state(float(steps[parameter]), self._moments.of(unit, index))
        if not zeroed:
            self.distrust()

    def distrust(self) -> None:
        """Called when moments without a state hold what an earlier optimizer has left: their first use zeroes them."""
        self._moments.distrust()

    def forget(self) -> None:
        """Gives the memory of the states back: called when the model is closed."""
        self._closed = True
        self._state = defaultdict(dict)
        self._moments = self._no_moments()
        self.in_order.clear()
        self._units.clear()

    def reserve(self, units: Sequence[Unit], device: Device, *, sums_gradients: bool, adds: bool = False) -> None:
        """Allocates states, and gradients where an update or ``sums_gradients`` needs them kept, of all ``units``.

        Raises BudgetError, MemoryError and StoreError where they, and what it ``adds`` up, do not fit; but for masters
        nothing is held then."""
        kept = [unit for unit in units if self._keeps_gradients(unit, sums_gradients)]
        gradient_bytes = sum(one.gradients.kept_bytes(adds=adds) for one in kept if one.gradients.buffer is None)
        trained = {unit: self._trained(unit) for unit in units}
        needs = [need for unit, its in trained.items() for need in self._needs(unit, its)]
        check_room(needs, f"{self.called}, its states and gradients,", gradient_bytes=gradient_bytes)
        before = [unit for unit in units if unit.gradients.buffer is None]
        try:
            for unit in units:
                self._allocate(unit, trained[unit])
                if unit in kept:
                    unit.gradients.allocate(device)
        except BaseException as error:
            for unit in before:
                unit.gradients.release()
            self._moments = self._no_moments()  # gives back what was had
            if not isinstance(error, MemoryError):
                raise
            raise MemoryError(
                f"{self.called}'s states and gradients could not be had: {error}; use states='8bit' or "
                "update='in_backward', or freeze parameters"
            ) from error

    def provide(self, indices: Mapping[Unit, list[int]]) -> None:
        """Allocates moments of parameters that had none when the optimizer was made; refuses what does not fit."""
        needs = [need for unit, its in indices.items() for need in self._needs(unit, its) if need[2]]
        if not needs:
            return
        names = ", ".join(dict.fromkeys(unit.name for unit, _, _ in needs))
        check_room(needs, f"{self.called}'s state of {names[:200]}")
        for unit, its in indices.items():
            self._allocate(unit, its)

    def move_with(self, unit: Unit, move: Callable[[], None]) -> None:
        """Has ``move`` take a unit to the device, of which no update is under way, and its states behind it."""
        self._moments.move_with(unit, move, self._state)

    def states_to_come(self, unit: Unit) -> dict[Tensor, ParameterState]:
        """Returns the states that the parameters of ``unit`` have once all with moments have taken a step."""
        return {unit.parameters[i]: as_state(1.0, held) for i, held in self._moments.held(unit).items()}

    def _needs(self, unit: Unit, indices: list[int]) -> list[Need]:
        """Returns what the parameters at ``indices`` have not got and an update needs: moments and remainders."""
        return [(unit, "moments", self._moments.missing_bytes(unit, indices)), missing_remainders(unit, indices)]

    def _allocate(self, unit: Unit, indices: list[int]) -> None:
        # First: moments are given back with the optimizer, and from a file's end alone.
        unit.place_remainders(indices)
        self._moments.allocate(unit, indices)

    def _keeps_gradients(self, unit: Unit, sums_gradients: bool) -> bool:
        sums = not self.in_backward or sums_gradients
        return bool(self._trained(unit)) and not unit.resident and (unit.has_device_copy if unit.is_root else sums)

    def scratch_bytes(self) -> int:
        """Returns what an update takes on the device at most while it runs, beside the libraries' own workspaces."""
        return 0

    # What a step updates.

    def updates(self, unit: Unit, index: int) -> bool:
        """Whether a parameter is in one of the groups."""
        return id(unit.parameters[index]) in self._groups

    def check_settings(self, *, once: bool = False) -> None:
        """Refuses what the user has set since the optimizer was made, before anything is updated with it.

        With ``once``, for the updates of a backward pass, it does so for the first one since the last step.
        """
        if once and self._checked:
            return
        self._checked = False
        check_groups(self.param_groups, self._groups, self.check_group)
        check_optimizer(
            self.states, "in_backward" if self.in_backward else "deferred", self.nonfinite, self.max_grad_norm
        )
        self._checked = once

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Raises ValueError for settings that are out of range, or that the update would not heed."""
        check_group(group)

    def change(self, unit: Unit, index: int, gradient: HostGrad) -> Change:
        """Notes what one parameter's update needs, with its group's settings as they are now."""
        return AdamWChange.of(index, gradient, self.state_of(unit, index), self.group_of(unit, index))

    def begun(self, updates: Iterable[Update]) -> None:
        """Notes the states of parameters that had none: nothing refuses ``updates`` any more."""
        for update in updates:
            parameters = update.unit.parameters
            self._state.update((parameters[change.index], change.state) for change in update.changes)

    def scale_for(self, norm: float) -> float | None:
        """Returns what to multiply gradients with whose norm is given, or None where the step must be skipped.

        Raises NonFiniteGradientError as the settings say.
        """
        self.settle(finite=(finite := math.isfinite(norm)))
        if finite:  # torch.nn.utils.clip_grad_norm_'s coefficient
            return 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (norm + 1e-6))
        if self.nonfinite == "raise":
            raise NonFiniteGradientError(
                f"the gradients' norm must be finite (got {norm}); nothing was updated"
                f"{' from the first such layer on' if self.in_backward else ''}",
                ". Lower the learning rate, clip, or pass nonfinite='skip' to go on without such steps",
            )
        self.skipped_steps += 1
        return None

    def settle(self, *, finite: bool) -> None:
        """Ends a backward pass of ``finite`` gradients or others: what was not updated does not count as a step."""
        for update in self.in_order:
            if not (finite or update.finite):
                update.take_back()
        self.in_order.clear()

    def has_state(self, unit: Unit, index: int) -> bool:
        """Whether a parameter has been updated, or a state was loaded for it."""
        return bool(self._state.get(unit.parameters[index]))

    def state_of(self, unit: Unit, index: int) -> ParameterState:
        """Returns the state of a parameter, or a first one that is not in use yet."""
        state: ParameterState | None = self._state.get(unit.parameters[index])
        return state or as_state(0.0, self._moments.begin(unit, index))

    def group_number(self, unit: Unit, index: int) -> int:
        """Returns the number of the group that a parameter is in."""
        return self._groups[id(unit.parameters[index])]

    def group_of(self, unit: Unit, index: int) -> dict[str, Any]:
        """Returns the group that a parameter is in."""
        return self.param_groups[self.group_number(unit, index)]

    def _no_moments(self) -> Moments:
        return Moments(self.states)

    def _trained(self, unit: Unit) -> list[int]:
        return [index for index, p in enumerate(unit.parameters) if self.updates(unit, index) and p.requires_grad]

    def _check_open(self) -> None:
        check_process(self._born)
        if self._closed:
            raise closed_error()

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self.param_groups for parameter in group["params"])
