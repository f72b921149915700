"""What a model may take of each memory beside what it holds: asked before more is allocated."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from stronghold.errors import BudgetError
from stronghold.settings import OffloadSettings
from stronghold.store.free_memory import HostMemory
from stronghold.units import format_bytes

_OF_INPUTS = (
    "use activations='disk' with a store on disk, or activations='recompute', which keeps them on the device, or make "
    "the batch smaller"
)


class Budget:
    """The budgets of a model, which ``processes`` of this machine train together.

    ``held`` returns what the model holds by now, (on the host, on the device); its object is referred to weakly.
    """

    def __init__(self, settings: OffloadSettings, held: Callable[[], tuple[int, int]], *, processes: int) -> None:
        self._device_memory, self._host_memory = settings.device_memory, settings.host_memory
        self.update, self.states = settings.update, settings.states
        """What is known of the optimizer that comes, None for nothing."""
        self.accumulates = settings.accumulates
        """Whether a step is known to add up several gradients."""
        self.for_inputs = settings.inputs_host_bytes
        """What of the host's memory is left to layers' inputs that are not there yet."""
        self._held = weakref.WeakMethod(held)
        self._processes = processes
        self._machine = HostMemory()

    def check(self, *, host_bytes: int, device_bytes: int, what: str) -> None:
        """Raises BudgetError or MemoryError where ``what`` does not fit; ``host_bytes`` are of all processes."""
        self.check_budgets(host_bytes=host_bytes // self._processes, device_bytes=device_bytes, what=what)
        held_host, _ = self._held_bytes()
        self._machine.check(host_bytes, held_host * self._processes, what)

    def check_inputs(self, host_bytes: int, what: str) -> None:
        """Raises BudgetError or MemoryError where ``what``, layers' inputs in this process, does not fit."""
        self.for_inputs = max(0, self.for_inputs - host_bytes)
        self._check(host_bytes, 0, what, "raise host_memory, " + _OF_INPUTS)
        held_host, _ = self._held_bytes()
        self._machine.check(host_bytes, held_host * self._processes, what, _OF_INPUTS)

    def check_budgets(self, *, host_bytes: int, device_bytes: int, what: str) -> None:
        """Raises BudgetError where ``what`` does not fit the budgets; ``host_bytes`` are of this process."""
        self._check(host_bytes, device_bytes, what, "")

    def _check(self, host_bytes: int, device_bytes: int, what: str, remedies: str) -> None:
        held_host, held_device = self._held_bytes()
        for name, budget, held, more in (
            ("device_memory", self._device_memory, held_device, device_bytes),
            ("host_memory", self._host_memory, held_host, host_bytes),
        ):
            left = self.for_inputs if name == "host_memory" else 0
            if isinstance(budget, int) and held + more + left > budget:
                others = f" and {format_bytes(left)} for layers' inputs" if left else ""
                raise BudgetError(
                    f"{what} takes {format_bytes(more)} beside {format_bytes(held)} that are held already{others} (got "
                    f"{name}={format_bytes(budget)}); "
                    + (remedies or f"raise {name}, freeze parameters, or {self._smaller()}")
                )

    def _smaller(self) -> str:
        """Returns which optimizer would take less."""
        told = [f"{name}={one!r}" for name in ("update", "states") if (one := getattr(self, name)) is not None]
        if told:
            return f"have the optimizer as offload() was told ({', '.join(told)}), or tell it which one comes"
        return "see states='8bit' and update='in_backward'"

    def _held_bytes(self) -> tuple[int, int]:
        held = self._held()
        return (0, 0) if held is None else held()
