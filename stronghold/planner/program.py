"""The operations of a training step, each with what it waits for; no times."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from stronghold.planner.step_costs import Resource


class Kind(Enum):
    """What an operation does; the value is its name in a timeline."""

    LAUNCH = "launch"
    LAUNCH_BACKWARD = "launch backward"
    LAUNCH_UPDATE = "launch update"
    FORWARD = "forward"
    BEFORE_GRADIENTS = "backward, no gradient yet"
    BACKWARD = "backward"
    FETCH = "fetch"
    READ = "read"
    GRADIENTS = "gradients"
    ADD = "add gradients"
    ADD_ON_DEVICE = "add gradients on the device"
    INPUTS_DOWN = "inputs down"
    INPUTS_UP = "inputs up"
    INPUTS_WRITE = "inputs to disk"
    INPUTS_READ = "inputs from disk"
    PREPARE = "prepare"
    MOMENTUM = "momentum"
    ITERATE = "iterate"
    UPDATE = "update"
    STEP = "step"
    UPDATE_ON_DEVICE = "update on the device"
    SETTLE = "written"
    UPLOAD = "upload"
    WAIT = "wait"
    END = "end of the step"


LAUNCHES = {
    Kind.FORWARD: Kind.LAUNCH,
    Kind.BEFORE_GRADIENTS: Kind.LAUNCH_BACKWARD,
    Kind.UPDATE_ON_DEVICE: Kind.LAUNCH_UPDATE,
}
"""What the host issues a layer's computation with; both halves of a backward pass are issued together."""


class Operation(NamedTuple):
    """One operation on the unit ``number``, a layer or behind them a ``RootWork``; ``part`` is that of a chunk on disk.

    ``after`` are the operations, by their place in the program, that must have ended before it begins: the one that its
    resource does before, what the engine makes it wait for, and what issues it.
    """

    resource: Resource
    kind: Kind
    number: int
    part: int
    after: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a program depends on.

    ``trained`` and ``on_disk`` have one entry for each layer, ``root_first`` and ``root_updates`` one for each
    ``RootWork``, which says where it is updated: ``UPDATE``, ``UPDATE_ON_DEVICE``, or None if it is not. ``chunks`` has
    one for each of both, in how many parts an update passes through the ring: 0 where it finds everything in memory.
    ``iterated`` are those of both that Muon updates, with iterations beside the computation. ``inputs`` are the layers
    whose inputs wait for the backward pass beside the device, and ``inputs_on_disk`` tells that they do so on disk. A
    step has so many ``passes``.
    """

    window: int
    resident: frozenset[int]
    trained: tuple[bool, ...]
    on_disk: tuple[bool, ...]
    chunks: tuple[int, ...]
    root_first: tuple[bool, ...]
    root_updates: tuple[Kind | None, ...]
    in_backward: bool
    staged: bool
    runs_behind: bool
    iterated: frozenset[int] = frozenset()
    inputs: frozenset[int] = frozenset()
    inputs_on_disk: bool = False
    passes: int = 1


@dataclass(frozen=True)
class Program:
    """The operations of several steps, the steady ones last; ``ends`` are the numbers of the steps' ``END``."""

    operations: tuple[Operation, ...]
    ends: tuple[int, ...]

    @cached_property
    def resources(self) -> list[int]:
        return [int(one.resource) for one in self.operations]

    @cached_property
    def uses(self) -> dict[tuple[Kind, int], list[int]]:
        """The operations of each kind and number: all of these do the same work."""
        uses: dict[tuple[Kind, int], list[int]] = {}
        for here, one in enumerate(self.operations):
            uses.setdefault((one.kind, one.number), []).append(here)
        return uses

    @cached_property
    def waiting(self) -> list[int]:
        """After how many others each operation is."""
        return [len(one.after) for one in self.operations]

    @cached_property
    def followers(self) -> list[list[int]]:
        """The operations that are after each."""
        followers: list[list[int]] = [[] for _ in self.operations]
        for here, one in enumerate(self.operations):
            for before in one.after:
                followers[before].append(here)
        return followers

    @cached_property
    def prepared(self) -> dict[int, list[int]]:
        """The chunks that each ``PREPARE`` gives to the ring: the next update of its layer."""
        prepared: dict[int, list[int]] = {}
        newest: dict[int, int] = {}
        for here, one in enumerate(self.operations):
            if one.kind is Kind.PREPARE:
                prepared[here], newest[one.number] = [], here
            elif one.kind is Kind.UPDATE and one.number in newest:
                prepared[newest[one.number]].append(here)
        return prepared

    @cached_property
    def on_disk(self) -> frozenset[int]:
        """The operations that need the disk."""
        chunks = (here for parts in self.prepared.values() for here in parts)
        kinds = (Kind.READ, Kind.PREPARE, Kind.SETTLE, Kind.INPUTS_WRITE, Kind.INPUTS_READ)
        return frozenset([*chunks, *(here for here, one in enumerate(self.operations) if one.kind in kinds)])
