"""What the engine issues for layers that are fetched, from disk or not: as in ``store/staging.py``."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from stronghold.planner.issued_inputs import Issue
from stronghold.planner.program import Kind
from stronghold.planner.step_costs import Resource

AHEAD = 2
"""Layers that are read from disk before their fetch, and one buffer more: as in ``store/staging.py``."""


class IssuedReads:
    """The fetches of layers, and reads of those ``on_disk``, by their number; ``staged`` ones through host memory.

    ``updated`` are the last operations of layers' updates, by layer.
    """

    def __init__(self, on_disk: Sequence[bool], issue: Issue, updated: Mapping[int, int], *, staged: bool) -> None:
        self._on_disk, self._issue, self._updated, self._staged = on_disk, issue, updated, staged
        self._buffers: deque[int | None] = deque([None] * (AHEAD + 1))
        self._ahead: dict[int, int] = {}
        self.reading: dict[int, int] = {}
        """The newest read of each layer."""

    @property
    def looks_ahead(self) -> bool:
        """Whether layers are read before their fetch."""
        return self._staged and any(self._on_disk)

    def fetch(self, layer: int, device: list[int | None], host: list[int | None]) -> int:
        """Brings a layer into its slot, which ``device`` must have freed; ``host`` must be over before it is issued."""
        if not self._on_disk[layer]:
            return self._issue(Resource.FETCHES, Kind.FETCH, layer, after=device, blocking=host)
        if layer in self._ahead:
            read = self._ahead.pop(layer)
        else:
            free = self._buffers.popleft() if self._staged else None
            read = self._issue(Resource.FETCHES, Kind.READ, layer, after=[*device, free], blocking=host)
            self.reading[layer] = read
            if not self._staged:
                return read
        done = self._issue(Resource.FETCHES, Kind.FETCH, layer, after=device, blocking=[*host, read])
        self._buffers.append(done)
        return done

    def expect(self, layers: Sequence[int]) -> None:
        """Has the ``layers`` that are fetched next read, and no others."""
        layers = [layer for layer in layers if self._on_disk[layer]]
        for layer in set(self._ahead).difference(layers):
            self.drop(layer)
        for layer in layers:
            if layer not in self._ahead:
                after = [self._buffers.popleft(), self._updated.get(layer)]
                self._ahead[layer] = self.reading[layer] = self._issue(Resource.READS, Kind.READ, layer, after=after)

    def drop(self, layer: int) -> None:
        """Gives up what was read of a layer that changes."""
        if layer in self._ahead:
            self._buffers.append(self._ahead.pop(layer))
