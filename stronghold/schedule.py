"""What to fetch, keep and evict: decisions over integers, made without torch.

A step touches layers in a sequence that is known ahead of time: forward 0, 1, … L-1, backward
L-1, … 0, forward again. That makes the window a cache whose future is known, and the least traffic
is that of Belady's rule (evict what is needed last; L. Belady, 1966). Two additions make it a
schedule: the rule looks one computation ahead, so that with two slots or more every fetch can run
under the computation before it; and each fetch is moved to the earliest moment that keeps the
traffic at that minimum, which is the end of its victim's last use (Cao, Felten, Karlin and Li,
1995, "do no harm" and "first opportunity").
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Action(Enum):
    """What a move does; the value is its letter in print."""

    FETCH = "F"
    EVICT = "E"
    COMPUTE = "C"


@dataclass(frozen=True)
class Move:
    """One decision about one layer, printed as its letter and the layer: ``F3``, ``E0``."""

    action: Action
    layer: int

    def __str__(self) -> str:
        return f"{self.action.value}{self.layer}"


class Computation(NamedTuple):
    """One computation of one layer, in the forward or in the backward pass."""

    layer: int
    backward: bool


def fetch(layer: int) -> Move:
    return Move(Action.FETCH, layer)


def evict(layer: int) -> Move:
    return Move(Action.EVICT, layer)


_AT_ONCE = 32
"""Computations of the future that are looked through together: more than a small window needs."""
_FEW = 16
"""Layers whose places are looked up one by one: of more, looking through the future takes less."""
_FORESEEN = 3
"""Computations to look through for each fetch that is asked for: what is fetched later has time until later."""


def possible_now(
    future: Sequence[int],
    held: Iterable[int],
    window: int,
    computing: int | None = None,
    known: KnownFuture | None = None,
) -> Iterator[Move]:
    """Yields the evictions and fetches that the least-traffic plan for ``future`` can make now.

    ``future`` are the layers to be computed, next first; ``computing`` is the layer in computation,
    whose slot is not free yet, or None between computations. The moves come in the order of need,
    each eviction before the fetch that takes its slot; the first fetch whose victim is still needed
    before it ends the list, so that the link carries the layers in the order they are computed. ``known`` spares
    looking through a long ``future`` for the layer that is needed last; the moves are the same without it.
    """
    held = set(held)
    previous = computing
    for t, layer in enumerate(future):
        if layer not in held:
            victim = None
            if len(held) >= window:
                if held.issubset({*future[:t], computing}):
                    return  # each is computed before this layer is, so that none can make room
                # One computation ahead: with two slots or more, what computes just before stays.
                victim = _needed_last(held.difference((previous,) if window > 1 else ()), future, t, known)
                if victim == computing or victim in future[:t]:
                    return
                held.remove(victim)
                yield evict(victim)
            held.add(layer)
            yield fetch(layer)
        previous = layer


def _needed_last(left: set[int], future: Sequence[int], start: int, known: KnownFuture | None = None) -> int:
    """Returns which of the layers ``left`` is computed last from ``start`` on; of those that are not, the highest."""
    begin = start
    while begin < len(future):
        part = future[begin : begin + _AT_ONCE]
        if not (later := left.difference(part)):
            return max(left, key=part.index)
        left, begin = later, begin + _AT_ONCE
        if len(left) <= _FEW and known is not None and (places := known.places_in(future)) is not None:
            return max(left, key=lambda layer: (places.next(layer, begin), layer))
    return max(left)


@dataclass
class KnownFuture:
    """Remembers where each layer is computed in a future, of which those behind it are the ends.

    A pass only takes away from the beginning of what was foreseen: the places are found once for all of it.
    """

    _future: Sequence[int] = ()
    _places: dict[int, list[int]] | None = None

    def places_in(self, future: Sequence[int]) -> _Places | None:
        """Returns the places in ``future`` if it is an end of the one before, None where it is not."""
        passed = len(self._future) - len(future)
        if passed < 0 or self._future[passed:] != future:
            self._future, self._places = future, None
            return None
        if self._places is None:
            self._places = {}
            for place, layer in enumerate(self._future):
                self._places.setdefault(layer, []).append(place)
        return _Places(self._places, passed)


class _Places(NamedTuple):
    """Where layers are in a future that lacks the ``passed`` first ones of another."""

    of: dict[int, list[int]]
    passed: int

    def next(self, layer: int, start: int) -> float:
        """Returns the first place of ``layer`` from ``start`` on, infinity where there is none."""
        begin = self.passed + start
        return next((place for place in self.of.get(layer, ()) if place >= begin), math.inf)


class Schedule:
    """Holds which layers are in the window and answers each event with moves.

    The events are the beginning and the end of a layer's computation, in forward and in backward,
    and a change of layers in the store. From them it foresees the computations to come: the rest of
    the forward pass as it went the last time, the backward pass over the layers that will return,
    and the next forward pass. A wrong forecast costs a late fetch, never a wrong result: a layer
    that is needed and not held is fetched when its computation begins.

    Traffic of a step that updates every layer of ``L``, with a window of ``w``: 2L - w fetches.
    Every update changes its layer, so each of the L forward computations needs a fetch; the backward
    pass finds the last w of them still in the window and needs the other L - w, and no schedule can
    find more than w. Without an update between them (accumulation), the next forward pass in turn
    finds the first w: 2(L - w) per pass. Frozen layers that no gradient reaches are not computed
    again in the backward pass, and no layer that did not change is fetched because of a step. An
    evaluation that goes round and round keeps most of the window in place and streams the others
    through the rest, each fetch under a computation: at most L - w + 2 fetches a pass.
    """

    def __init__(self, layers: int, window: int) -> None:
        if not 1 <= window <= layers:
            raise ValueError(
                f"window must be between 1 and the number of layers (got window={window}, "
                f"layers={layers}); pass a smaller window, or 'auto'"
            )
        self.layers = layers
        self.window = window
        self._held: set[int] = set()
        self._computing: int | None = None
        self._last: int | None = None
        self._training = False
        self._backward = False
        self._remaining: tuple[int, ...] = ()
        self._after = {mode: {i: (i + 1) % layers for i in range(layers)} for mode in (True, False)}
        self._first = {True: 0, False: 0}
        self._rounds: dict[bool, tuple[int, ...]] = {}
        """A whole forward pass, as it follows from ``_first`` and ``_after``; by mode, as far as it is known."""
        self._returning = [True] * layers
        self._changed: frozenset[int] = frozenset()
        """What has changed since the last computation began."""
        self._changes: dict[tuple[bool, int] | int, frozenset[int]] = {}
        """The same between a computation and the next one, the last time: by layer and direction, or place in order."""
        self._order: tuple[Computation, ...] = ()
        self._twice_round: tuple[int, ...] = ()
        """The layers of the order, twice: from any place on it is there as a whole."""
        self._place: int | None = None
        """The last computation's place in the order, or None where it is not in it."""
        self._known = KnownFuture()
        self._left_out: frozenset[int] = frozenset()
        """The layers that a forward pass is known to pass over."""

    def leave_out(self, layers: Iterable[int], among: Iterable[int]) -> list[Move]:
        """Foresees that a forward pass computes of the layers ``among`` all but ``layers``; says what can move now.

        It holds until the same layers are spoken of again: a pass is foreseen as the last one went.
        """
        self._left_out = (self._left_out - frozenset(among)) | frozenset(layers)
        if self._computing is not None or self._last is None:
            return []
        return self._apply(self._possible_now(self._last))

    def follow(self, order: Sequence[Computation]) -> None:
        """Foresees ``order``, again and again, in place of what it sees by itself; an empty one ends that.

        It is for steps that are not one forward and one backward pass: micro-batches that go through a pipeline's stage
        in turn. Where a computation is left out the order is taken up behind it; an evaluation is not looked for in it.
        """
        self._order, self._place = tuple(order), None
        self._twice_round = 2 * tuple(computation.layer for computation in self._order)
        self._changes.clear()

    def start_over(self) -> None:
        """Forgets what the window holds, and a computation under way: moves were given up, which are made anew."""
        self._held.clear()
        self._computing = None

    @property
    def held(self) -> frozenset[int]:
        """The layers in the window, those on their way included."""
        return frozenset(self._held)

    def begin_forward(self, layer: int, *, training: bool, behind: Sequence[int] = ()) -> list[Move]:
        """Says what must move when ``layer`` begins its forward computation.

        ``training`` tells that a backward pass may follow; ``behind`` are the layers computed before
        it that a backward pass will compute again, in forward order.
        """
        self._remember_changes()
        if self._last is None or self._backward or training != self._training:
            if self._first[training] != layer:
                self._first[training] = layer
                self._rounds.pop(training, None)
        elif self._next(self._last, training) != layer:
            self._after[training][self._last] = layer
            self._rounds.pop(training, None)
        self._training, self._backward = training, False
        self._remaining = tuple(reversed(behind))
        self._place = self._next_place(Computation(layer, False)) if training else None
        return self._begin(layer)

    def end_forward(self, *, returning: bool) -> list[Move]:
        """Says what can move now; ``returning``: a backward pass will compute this layer again."""
        layer = self._end()
        if self._training:
            self._returning[layer] = returning
            if returning:
                self._remaining = (layer, *self._remaining)
        return self._apply(self._possible_now(layer))

    def begin_backward(self, layer: int, remaining: Sequence[int]) -> list[Move]:
        """Says what must move when ``layer`` begins its backward computation.

        ``remaining`` are the layers that this backward pass will compute after it, in that order.
        """
        self._remember_changes()
        self._backward, self._training = True, True
        self._remaining = tuple(remaining)
        self._place = self._next_place(Computation(layer, True))
        return self._begin(layer)

    def end_backward(self) -> list[Move]:
        """Says what can move now that the layer's backward computation has ended."""
        layer = self._end()
        return self._apply(self._possible_now(layer))

    def changed(self, layers: Iterable[int]) -> list[Move]:
        """Drops what changed in the store and says what to fetch for the computations to come."""
        changed = frozenset(layers)
        self._changed |= changed
        moves = self._apply([evict(layer) for layer in sorted(self._held & changed)])
        if self._computing is None and self._last is not None:
            moves += self._apply(self._possible_now(self._last))
        return moves

    def ahead(self, count: int) -> list[int]:
        """Foresees the layers of the next ``count`` fetches beyond those already made, in their order.

        It goes on as it went the last time, updates included, and does what it will do then. The list is for those who
        read a layer before it is fetched: it ends before the first one that is to change before its fetch, and where
        fetches are further away than a few computations.
        """
        if self._last is None:
            return []
        twin, found, stale = self._twin(), list[int](), set[int]()
        for _ in range(_FORESEEN * count):
            moves = twin._end_as_before()
            assert twin._last is not None
            changes = twin._changes.get(twin._behind(), frozenset()) - twin._changed
            stale |= changes
            moves += twin.changed(changes)
            moves += twin._begin_next()
            for move in moves:
                if move.action is Action.FETCH:
                    if move.layer in stale or len(found) == count:
                        return found
                    found.append(move.layer)
        return found

    def _twin(self) -> Schedule:
        """Returns one that goes on from here by itself; what never changes is not copied, for an order may be long."""
        twin = copy.copy(self)
        twin._held, twin._returning = set(self._held), list(self._returning)
        twin._after, twin._first = {mode: dict(after) for mode, after in self._after.items()}, dict(self._first)
        twin._rounds, twin._changes = dict(self._rounds), dict(self._changes)
        twin._known = KnownFuture()
        return twin

    def _end_as_before(self) -> list[Move]:
        """Ends the computation under way, if there is one."""
        if self._computing is None:
            return []
        return self.end_backward() if self._backward else self.end_forward(returning=self._returning[self._computing])

    def _begin_next(self) -> list[Move]:
        """Begins the computation that is foreseen next."""
        assert self._last is not None
        if self._place is not None:
            layer, backward = self._order[(self._place + 1) % len(self._order)]
            return self.begin_backward(layer, ()) if backward else self.begin_forward(layer, training=True)
        rest = () if self._backward else self._pass(self._last, self._training)[1:]
        if self._training and self._remaining and not rest:
            return self.begin_backward(self._remaining[0], self._remaining[1:])
        layer = rest[0] if rest else self._first[self._training]
        return self.begin_forward(layer, training=self._training, behind=self._remaining[::-1] if rest else ())

    def _remember_changes(self) -> None:
        if self._last is not None:
            self._changes[self._behind()] = self._changed
        self._changed = frozenset()

    def _behind(self) -> tuple[bool, int] | int:
        """Names the time between the last computation and the next."""
        assert self._last is not None
        return (self._backward, self._last) if self._place is None else self._place

    def _next_place(self, computation: Computation) -> int | None:
        """Returns where ``computation`` comes next in the order."""
        begin = 0 if self._place is None else self._place + 1
        for place in (*range(begin, len(self._order)), *range(begin)):
            if self._order[place] == computation:
                return place
        return None

    def _possible_now(self, layer: int) -> Iterator[Move]:
        """Yields what can move behind the beginning of ``layer``, or behind its end."""
        return possible_now(self._future(layer), self._held, self.window, self._computing, self._known)

    def _begin(self, layer: int) -> list[Move]:
        moves: list[Move] = []
        self._last = layer
        if layer not in self._held:
            future = [layer, *self._future(layer)]
            if len(self._held) >= self.window:
                victim = _needed_last(self._held, future, 0)
                moves += self._apply([evict(victim)])
            moves += self._apply([fetch(layer)])
        self._computing = layer
        moves += self._apply(self._possible_now(layer))
        return moves

    def _end(self) -> int:
        assert self._computing is not None, "a computation ends that has not begun"
        layer, self._computing = self._computing, None
        return layer

    def _apply(self, moves: Iterable[Move]) -> list[Move]:
        done = list(moves)
        for move in done:
            (self._held.add if move.action is Action.FETCH else self._held.remove)(move.layer)
        assert len(self._held) <= self.window, "more layers held than the window has slots"
        return done

    def _future(self, layer: int) -> Sequence[int]:
        """Foresees the computations after that of ``layer``, as far as decisions depend on them."""
        if self._place is not None:
            begin = self._place + 1
            return self._twice_round[begin : begin + len(self._order)]
        if self._backward:
            return self._remaining + self._pass(self._first[True], True)
        rest = self._pass(layer, self._training)[1:]
        if not self._training:
            return rest + self._pass(self._first[False], False)
        again = rest[::-1] if False not in self._returning else tuple(x for x in rest[::-1] if self._returning[x])
        back = (layer,) if self._computing == layer and self._returning[layer] else ()
        return rest + again + back + self._remaining + self._pass(self._first[True], True)

    def _pass(self, start: int, training: bool) -> tuple[int, ...]:
        """Returns one forward pass from ``start`` on, in the order it had the last time."""
        if training not in self._rounds:
            self._rounds[training] = self._walk(self._first[training], training)
        whole = self._rounds[training]
        turned = start in whole and self._after[training][whole[-1]] == whole[0]
        passed = whole[whole.index(start) :] if turned else self._walk(start, training)
        return (start, *(x for x in passed[1:] if x not in self._left_out)) if self._left_out else passed

    def _next(self, layer: int, training: bool) -> int:
        """Returns the layer that is foreseen behind ``layer`` in a forward pass."""
        after = self._after[training]
        following = after[layer]
        for _ in self._left_out:
            if following not in self._left_out:
                break
            following = after[following]
        return following

    def _walk(self, start: int, training: bool) -> tuple[int, ...]:
        after, first, walked = self._after[training], self._first[training], [start]
        while (layer := after[walked[-1]]) != first and len(walked) < self.layers:
            walked.append(layer)
        return tuple(walked)


def trace(layers: int, window: int, passes: Sequence[str]) -> str:
    """Prints what the schedule does over ``passes``, each of "forward", "backward", "evaluate" or "step".

    ``trace(4, 2, ["forward", "backward"])`` is
    ``F0 F1 C0 E0 F2 C1 E1 F3 C2 C3 C3 E3 F1 C2 E2 F0 C1 C0``.
    """
    schedule = Schedule(layers, window)
    moves: list[Move] = []
    for kind in passes:
        if kind == "step":
            moves += schedule.changed(range(layers))
            continue
        for i in reversed(range(layers)) if kind == "backward" else range(layers):
            compute = Move(Action.COMPUTE, i)
            if kind == "backward":
                moves += [*schedule.begin_backward(i, range(i - 1, -1, -1)), compute, *schedule.end_backward()]
            else:
                training = kind == "forward"
                begin = schedule.begin_forward(i, training=training, behind=range(i) if training else ())
                moves += [*begin, compute, *schedule.end_forward(returning=training)]
    return " ".join(map(str, moves))
