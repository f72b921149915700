"""What a process of a model in stages takes."""

from __future__ import annotations

from typing import NamedTuple

from stronghold.planner.step_bytes import StepBytes


class Taken(NamedTuple):
    """What a process takes: units and buffers as its report has them, activations on top, the device's budget, and what
    a step writes to disk. ``sums_bytes`` more are of the host where gradients of micro-batches are added up."""

    held: StepBytes
    activation_bytes: int
    device_memory: int
    written_bytes: int
    sums_bytes: int

    @property
    def device_bytes(self) -> int:
        """The most that a step takes of the device."""
        return self.held.device + self.held.root_gradients + self.activation_bytes

    @property
    def host_bytes(self) -> int:
        """What is held in host memory, but for the process itself."""
        return self.held.host + self.sums_bytes
