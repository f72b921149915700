"""What the engine issues in a step: its schedule played through, each operation with what it waits for.

The decisions are those of ``Schedule``, asked event for event as the engine's window asks it; around them this follows
the engine: ``window/window.py`` (slots and fetches), ``window/grad_offload.py`` (gradient slots and staging),
``engine/engine.py`` (the order of closing a layer, its update and the next one's opening), ``engine/updates.py`` and
``store/staging.py``. Nothing here knows a time: one program serves all layers' costs and all machines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import lru_cache

from stronghold.planner.issued_inputs import IssuedInputs
from stronghold.planner.issued_reads import AHEAD, IssuedReads
from stronghold.planner.program import LAUNCHES, Kind, Operation, Program, Shape
from stronghold.planner.step_costs import Resource
from stronghold.schedule import Action, Move, Schedule

GRADIENT_SLOTS = 2
"""On the device, and as many staging buffers on the host: ``RING`` of ``window/grad_offload.py``."""
STEPS = 4
"""Steps of a program. What the first one lacks, for there is no step before it, is over after the second: each step
waits for all gradients of its own, so that nothing is carried further."""


@lru_cache(maxsize=256)
def program_of(shape: Shape) -> Program:
    """Returns what the engine issues in ``STEPS`` steps, the first of them from a standing start."""
    engine, relative, before = _Issuing(shape), [], None
    for _ in range(STEPS):
        begin = len(engine.operations)
        engine.step()
        new = enumerate(engine.operations[begin:], begin)
        relative = [one._replace(after=tuple(here - there for there in one.after)) for here, one in new]
        if relative == before:
            break
        before = relative
    operations, ends = engine.operations, engine.ends
    while len(ends) < STEPS:
        for here, one in enumerate(relative, len(operations)):
            operations.append(one._replace(after=tuple(here - distance for distance in one.after)))
        ends.append(len(operations) - 1)
    return Program(tuple(operations), tuple(ends))


class _IssuedSlot:
    def __init__(self) -> None:
        self.ready: int | None = None
        self.read: int | None = None


class _Issuing:
    """The engine's part that issues: the same events in the same order, with operations' numbers as its events."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.layers = len(shape.trained)
        self.operations: list[Operation] = []
        self.ends: list[int] = []
        self._last: dict[Resource, int] = {}
        self._blocking: dict[int, list[int]] = {}
        """What a stream's thread must have seen before it can issue an operation to the device."""
        self._issuer = Resource.HOST if shape.runs_behind else Resource.COMPUTE
        self._streamed = [layer for layer in range(self.layers) if layer not in shape.resident]
        self._number = {layer: number for number, layer in enumerate(self._streamed)}
        window = min(shape.window, len(self._streamed))
        self._schedule = Schedule(len(self._streamed), window) if self._streamed else None
        self._free = [_IssuedSlot() for _ in range(window)]
        self._where: dict[int, _IssuedSlot] = {}
        self._updated: dict[int, int] = {}
        self._uploaded: dict[int, int] = {}
        self._drained: deque[int | None] = deque([None] * GRADIENT_SLOTS)
        self._staging_free: deque[int | None] = deque([None] * GRADIENT_SLOTS)
        self._down: int | None = None
        self._added: int | None = None
        self._reads = IssuedReads(shape.on_disk, self._issue, self._updated, staged=shape.staged)
        self._inputs = IssuedInputs(shape.inputs, self._issue, on_disk=shape.inputs_on_disk)

    def step(self) -> None:
        """One step of the ordinary loop: forward and backward passes, the optimizer's step."""
        root = list(enumerate(self.shape.root_first, self.layers))
        first, last = [unit for unit, is_first in root if is_first], [unit for unit, is_first in root if not is_first]
        for number in range(self.shape.passes):
            if number:  # gradients of the pass before are published
                self._issue(self._issuer, Kind.WAIT, after=[self._down, self._added])
            self._pass(first, last, adds=number > 0)
        self._take_step(first, last)
        self.ends.append(self._issue(self._issuer, Kind.END))

    def _pass(self, first: list[int], last: list[int], *, adds: bool) -> None:
        """A forward and a backward pass; ``adds`` tells that there are gradients of one before."""
        for unit in first:
            self._compute(Kind.FORWARD, unit, [self._uploaded.get(unit)])
        for layer in range(self.layers):
            self._forward(layer)
        for unit in last:
            self._compute(Kind.FORWARD, unit, [self._uploaded.get(unit)])
        for unit in reversed(last):
            self._compute(Kind.BACKWARD, unit, [])
        for layer in reversed(range(self.layers)):
            if layer + 1 < self.layers:
                self._close(layer + 1, adds=adds)
            self._open(layer)
        for unit in reversed(first):
            self._compute(Kind.BACKWARD, unit, [])
        self._close(0, adds=adds)  # at the very end of the backward pass, behind the root's
        for unit in [*first, *last]:
            if adds and self.shape.root_updates[unit - self.layers] is not None:
                self._compute(Kind.ADD_ON_DEVICE, unit, [])

    # As in window.py.

    def _forward(self, layer: int) -> None:
        if (schedule := self._scheduled(layer)) is not None:
            behind = range(self._number[layer])
            self._carry_out(schedule.begin_forward(self._number[layer], training=True, behind=behind))
        ready = self._ready(layer)
        free = self._inputs.sent(layer, [ready, self._last.get(Resource.COMPUTE)])
        done = self._compute(Kind.FORWARD, layer, [ready, *free])
        if schedule is not None:
            self._where[layer].read = done
            self._carry_out(schedule.end_forward(returning=True))

    def _open(self, layer: int) -> None:
        if (schedule := self._scheduled(layer)) is not None:
            number = self._number[layer]
            self._carry_out(schedule.begin_backward(number, range(number - 1, -1, -1)))
        ready = [self._ready(layer), self._inputs.taken(layer, self._last[Resource.COMPUTE])]
        drained = [self._drained[0]] if schedule is not None and self.shape.trained[layer] else []
        self._compute(Kind.BEFORE_GRADIENTS, layer, ready)
        # The copy down of the layer that used this gradient slot before must have read it.
        self._compute(Kind.BACKWARD, layer, drained)

    def _close(self, layer: int, *, adds: bool) -> None:
        done = self._last[Resource.COMPUTE]
        updated = self._gradients(layer, done, adds=adds) if self.shape.trained[layer] else False
        if (schedule := self._scheduled(layer)) is None:
            return
        self._where[layer].read = done
        self._carry_out(schedule.end_backward())
        if updated:
            self._changed([layer])

    def _scheduled(self, layer: int) -> Schedule | None:
        return self._schedule if layer in self._number else None

    def _ready(self, layer: int) -> int | None:
        return self._where[layer].ready if layer in self._where else None

    def _changed(self, layers: Iterable[int]) -> None:
        numbers = [self._number[layer] for layer in layers if layer in self._number]
        for number in numbers:
            self._reads.drop(self._streamed[number])
        if self._schedule is not None:
            self._carry_out(self._schedule.changed(numbers))

    def _carry_out(self, moves: Iterable[Move]) -> None:
        for move in moves:
            layer = self._streamed[move.layer]
            if move.action is Action.EVICT:
                self._free.append(self._where.pop(layer))
                continue
            slot = self._where[layer] = self._free.pop()
            slot.ready = self._reads.fetch(layer, [slot.read], [self._updated.get(layer)])
        if self._schedule is not None and self._reads.looks_ahead:
            self._reads.expect([self._streamed[number] for number in self._schedule.ahead(AHEAD)])

    # As in gradients.py, grad_offload.py and updates.py.

    def _gradients(self, layer: int, computed: int, *, adds: bool) -> bool:
        """Sends a layer's gradients down; under in_backward it is updated behind them. Returns whether it is.

        With ``adds`` the host adds them to those that it has.
        """
        if layer in self.shape.resident:
            if self.shape.in_backward:
                self._compute(Kind.UPDATE_ON_DEVICE, layer, [])
            elif adds:
                self._compute(Kind.ADD_ON_DEVICE, layer, [])
            return False
        staging = self._staging_free.popleft() if self.shape.in_backward or adds else None
        down = self._issue(Resource.GRADIENTS, Kind.GRADIENTS, layer, after=[computed], blocking=[staging])
        self._drained.popleft()
        self._drained.append(down)
        if adds:
            self._added = self._issue(Resource.UPDATES, Kind.ADD, layer, after=[down])
            self._staging_free.append(self._added)
        if not self.shape.in_backward:
            self._down = down
            return False
        self._prepare(layer)
        self._staging_free.append(self._update(layer, [down]))
        return True

    def _take_step(self, first: list[int], last: list[int]) -> None:
        # Published gradients are read on the host; in_backward waits for what was updated meanwhile. Of root parameters
        # the host reads the norms, which the computation is to have ended for.
        awaited = list(self._updated.values()) if self.shape.in_backward else [self._down, self._added]
        self._issue(self._issuer, Kind.WAIT, after=[*awaited, self._last[Resource.COMPUTE]])
        layers = [] if self.shape.in_backward else [n for n in range(self.layers) if self.shape.trained[n]]
        updated = [*first, *layers, *last]
        on_host = [unit for unit in updated if self._updates(unit) is Kind.UPDATE]
        for unit in on_host:
            self._prepare(unit)
        for unit in on_host:
            if unit < self.layers:
                self._update(unit, [])
            else:
                done = self._update(unit, [self._issue(Resource.GRADIENTS, Kind.GRADIENTS, unit)])
                self._uploaded[unit] = self._issue(Resource.ROOT, Kind.UPLOAD, unit, blocking=[done])
        for unit in updated:  # last, so that the host is at work meanwhile
            if self._updates(unit) is Kind.UPDATE_ON_DEVICE:
                self._compute(Kind.UPDATE_ON_DEVICE, unit, [])
        self._changed(layers)

    def _updates(self, unit: int) -> Kind | None:
        """Returns how a unit is updated in the optimizer's step."""
        if unit >= self.layers:
            return self.shape.root_updates[unit - self.layers]
        return Kind.UPDATE_ON_DEVICE if unit in self.shape.resident else Kind.UPDATE

    def _prepare(self, unit: int) -> None:
        if self.shape.chunks[unit]:
            self._issue(self._issuer, Kind.PREPARE, unit)  # its chunks are read from now on, as the ring has room

    def _update(self, unit: int, after: list[int | None]) -> int:
        after = [*after, self._reads.reading.get(unit)]
        done, iterated = self._update_by_muon(unit, after) if unit in self.shape.iterated else (None, None)
        if done is None:
            done = self._update_parts(unit, range(max(1, self.shape.chunks[unit])), after)
        if self.shape.chunks[unit]:
            done = self._issue(Resource.SETTLED, Kind.SETTLE, unit, after=[done, iterated])
        if unit < self.layers:
            self._updated[unit] = done
        return done

    def _update_by_muon(self, unit: int, after: list[int | None]) -> tuple[int, int]:
        """Updates a unit with the device's iterations in between; returns the last operation, and the iterations."""
        if chunks := self.shape.chunks[unit]:
            # Masters come through the ring behind all momenta, whose iterations must be over by then.
            half = (chunks + 1) // 2
            done = self._update_parts(unit, range(half), after)
            iterated = self._issue(Resource.ITERATIONS, Kind.ITERATE, unit, after=[done])
            return self._update_parts(unit, range(half, chunks), [iterated]) if chunks > 1 else done, iterated
        first = self._issue(Resource.UPDATES, Kind.MOMENTUM, unit, after=after)
        iterated = self._issue(Resource.ITERATIONS, Kind.ITERATE, unit, after=[first])
        others = self._update_parts(unit, range(1), [])
        return self._issue(Resource.UPDATES, Kind.STEP, unit, after=[others, iterated]), iterated

    def _update_parts(self, unit: int, parts: Iterable[int], after: list[int | None]) -> int:
        return [self._issue(Resource.UPDATES, Kind.UPDATE, unit, part, after=after) for part in parts][-1]

    # How anything is issued.

    def _compute(self, kind: Kind, number: int, after: list[int | None]) -> int:
        if not self.shape.runs_behind:
            return self._issue(Resource.COMPUTE, kind, number, after=after)
        # To wait for a copy in the device's order it must have been issued, which a thread does that waits for updates.
        blocking = [host for event in after if event is not None for host in self._blocking.get(event, ())]
        # What the root takes is in its computation.
        launch = LAUNCHES.get(kind, Kind.WAIT) if number < self.layers else Kind.WAIT
        self._issue(Resource.HOST, launch, number, after=blocking)
        return self._issue(Resource.COMPUTE, kind, number, after=after)

    def _issue(
        self,
        resource: Resource,
        kind: Kind,
        number: int = 0,
        part: int = 0,
        *,
        after: Iterable[int | None] = (),
        blocking: Iterable[int | None] = (),
    ) -> int:
        here = len(self.operations)
        blocked = [event for event in blocking if event is not None]
        if blocked:
            self._blocking[here] = blocked
        awaited = {event for event in (*after, *blocked) if event is not None}
        awaited.update(self._last[each] for each in (resource, self._issuer) if each in self._last)
        self.operations.append(Operation(resource, kind, number, part, tuple(sorted(awaited))))
        self._last[resource] = here
        return here
