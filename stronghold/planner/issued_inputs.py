"""What the engine issues for layers' inputs that wait beside the device: as in ``window/activations.py``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from stronghold.planner.program import Kind
from stronghold.planner.step_costs import Resource

SLOTS = 2
"""On the device, each way: that name there."""


class IssuedInputs:
    """The copies of the inputs of ``layers``; ``issue`` puts an operation into the program, and returns its number."""

    def __init__(self, layers: frozenset[int], issue: Callable[..., int]) -> None:
        self._layers, self._issue = layers, issue
        self._sent: deque[int | None] = deque([None] * SLOTS)
        self._down: dict[int, int] = {}
        self._up: dict[int, int] = {}
        self._kept: list[int] = []
        """The layers whose inputs the backward pass still needs, the next one last."""

    def sent(self, layer: int, after: list[int | None]) -> list[int | None]:
        """Sends a layer's inputs down before it computes; returns what must have freed the slot that they leave by."""
        if layer not in self._layers:
            return []
        self._kept.append(layer)
        free = self._sent.popleft()
        self._down[layer] = self._issue(Resource.GRADIENTS, Kind.INPUTS_DOWN, layer, after=[*after, free])
        self._sent.append(self._down[layer])
        return [free]

    def taken(self, layer: int, computed: int) -> int | None:
        """Returns the copy up of a layer's inputs, and begins that of those that are needed next."""
        if layer not in self._layers:
            return None
        for one in self._kept[:-3:-1]:
            if one not in self._up:
                after = [self._down[one], computed]
                self._up[one] = self._issue(Resource.FETCHES, Kind.INPUTS_UP, one, after=after)
        return self._up.pop(self._kept.pop())
