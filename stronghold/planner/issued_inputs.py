"""What the engine issues for layers' inputs that wait beside the device.

As in ``window/activations.py``, and in ``window/shelves.py`` where they wait on disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from stronghold.planner.program import Kind
from stronghold.planner.step_costs import Resource

SLOTS = 2
"""On the device, each way: that name there."""
STAGING = 3
"""Buffers of host memory through which they go to disk: ``INPUT_STAGING`` of ``store/input_file.py``."""
AHEAD = STAGING - 1
"""Layers whose inputs are read before their copy up: that name there."""
Issue = Callable[..., int]
"""Puts an operation into the program, and returns its number."""


class IssuedInputs:
    """The copies of the inputs of ``layers``, and their transfers where they are ``on_disk``."""

    def __init__(self, layers: frozenset[int], issue: Issue, *, on_disk: bool = False) -> None:
        self._layers, self._issue = layers, issue
        self._shelf = _OnDisk(issue) if on_disk else _OnHost()
        self._sent: deque[int | None] = deque([None] * SLOTS)
        self._up: dict[int, int] = {}
        self._kept: list[int] = []
        """The layers whose inputs the backward pass still needs, the next one last."""

    def sent(self, layer: int, after: list[int | None]) -> list[int | None]:
        """Sends a layer's inputs down before it computes; returns what must have freed the slot that they leave by."""
        if layer not in self._layers:
            return []
        self._kept.append(layer)
        free, blocking = self._sent.popleft(), self._shelf.room(layer)
        down = self._issue(Resource.GRADIENTS, Kind.INPUTS_DOWN, layer, after=[*after, free], blocking=blocking)
        self._shelf.arrived(layer, down)
        self._sent.append(down)
        return [free]

    def taken(self, layer: int, computed: int) -> int | None:
        """Returns the copy up of a layer's inputs, and begins that of those that are needed next."""
        if layer not in self._layers:
            return None
        for one in self._kept[:-3:-1]:
            if one not in self._up:
                there, blocking = self._shelf.source(one)
                after = [*there, computed]
                self._up[one] = self._issue(Resource.FETCHES, Kind.INPUTS_UP, one, after=after, blocking=blocking)
                self._shelf.copied_up(one, self._up[one])
        self._kept.pop()
        self._shelf.expect(self._kept[: -AHEAD - 1 : -1])
        return self._up.pop(layer)


class _OnHost:
    """Inputs in buffers of their own."""

    def __init__(self) -> None:
        self._down: dict[int, int] = {}

    def room(self, layer: int) -> list[int]:
        """Returns what the copy down of a layer's inputs blocks for."""
        return []

    def arrived(self, layer: int, down: int) -> None:
        """Called with that copy."""
        self._down[layer] = down

    def source(self, layer: int) -> tuple[list[int], list[int]]:
        """Returns what the copy up is after, and what it blocks for."""
        return [self._down[layer]], []

    def copied_up(self, layer: int, up: int) -> None:
        """Called with that copy."""

    def expect(self, layers: Sequence[int]) -> None:
        """Called with the layers that the backward pass comes to next, in its order."""


@dataclass(eq=False)
class _Staging:
    layer: int | None = None
    there: int | None = None
    was_read: bool = False
    in_use: list[int] = field(default_factory=list)


class _OnDisk(_OnHost):
    """Inputs in a file, behind buffers that hold the newest ones."""

    def __init__(self, issue: Issue) -> None:
        super().__init__()
        self._issue = issue
        self._buffers = [_Staging() for _ in range(STAGING)]
        """The one that was filled last is the last."""

    def room(self, layer: int) -> list[int]:
        for buffer in self._buffers:
            if buffer.layer == layer:  # those of the step before
                buffer.layer = None
        return self._fill(layer, [layer]).in_use

    def arrived(self, layer: int, down: int) -> None:
        buffer = self._holding(layer)
        buffer.there, buffer.was_read = down, False
        buffer.in_use = [self._issue(Resource.INPUTS, Kind.INPUTS_WRITE, layer, after=[down])]

    def source(self, layer: int) -> tuple[list[int], list[int]]:
        self._read(layer, [layer])
        buffer = self._holding(layer)
        assert buffer.there is not None
        return ([], [buffer.there]) if buffer.was_read else ([buffer.there], [])

    def copied_up(self, layer: int, up: int) -> None:
        self._holding(layer).in_use.append(up)

    def expect(self, layers: Sequence[int]) -> None:
        for layer in layers:
            self._read(layer, layers)

    def _read(self, layer: int, wanted: Collection[int]) -> None:
        if any(buffer.layer == layer for buffer in self._buffers):
            return
        buffer = self._fill(layer, wanted)
        buffer.there = self._issue(Resource.INPUTS, Kind.INPUTS_READ, layer, after=buffer.in_use)
        buffer.was_read, buffer.in_use = True, [buffer.there]

    def _holding(self, layer: int) -> _Staging:
        return next(buffer for buffer in self._buffers if buffer.layer == layer)

    def _fill(self, layer: int, wanted: Collection[int]) -> _Staging:
        buffer = next(one for one in self._buffers if one.layer not in wanted)
        self._buffers.remove(buffer)
        self._buffers.append(buffer)
        buffer.layer = layer
        return buffer
