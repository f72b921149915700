"""Runs a program on every twin and compares what they do, operation by operation."""

from __future__ import annotations

import functools
import math
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stronghold.errors import CorruptionError, DiskError, StrongholdError
from tests.fuzz.memory import Write
from tests.fuzz.programs import Program
from tests.fuzz.states import Switch, final
from tests.fuzz.twin import OURS, Skipped, Twin, Way


@dataclass(frozen=True)
class Outcome:
    """What one operation came to on one twin: a value, or an error and where it was raised."""

    value: Any = None
    error: str = ""
    message: str = ""
    place: str = ""
    refused: bool = False
    """Whether the error is one that says why, of stronghold's own."""
    stage: str = ""


@dataclass(frozen=True)
class Failure:
    """Where a program went wrong, and how. ``kind`` and ``place`` are the same for the same cause, mostly."""

    kind: str
    place: str
    message: str
    where: str


REFUSALS: Counter[str] = Counter()
"""How often each place of stronghold's has refused an operation: what a run of many programs has not tried."""


def run(program: Program) -> Failure | None:
    """Runs a program; returns what was wrong first, or None."""
    several = [_outcomes(program, way) for way in program.ways]
    for outcomes, way in zip(several, program.ways, strict=True):
        for number, (outcome, first) in enumerate(zip(outcomes, several[0], strict=False)):
            if _asks_for_deferred(outcome) != _asks_for_deferred(first):
                break  # one of the two updates in the backward pass
            others = program.ways[0]
            keeps, others_keep = (one.activations == "keep" for one in (way, others))
            if _stale(outcome) != _stale(first) and (
                keeps != others_keep or (keeps and way.resident != others.resident)
            ):
                # One of the two runs a layer again, whose graph needs none of its weights; or one keeps all of a
                # resident layer, and does what plain PyTorch does where the user holds on to its weights.
                break
            where = f"{_named(program, number)} with {way}"
            failure = _is_raw(outcome, where) or _differ(outcome, first, EXACT, where, "another way")
            if failure is not None:
                return failure
    ours = several[0]
    REFUSALS.update(f"{outcome.error} {outcome.place}" for outcome in ours if outcome.refused)
    plain = _outcomes(program, None, skipped=ours)
    for number, (one, other, tolerance) in enumerate(zip(ours, plain, _tolerances(program), strict=False)):
        if tolerance is FINITE and "experts" in program.model.layers:
            return None  # the last bits decide which experts a token goes to, and so which are trained at all
        if not one.refused and (failure := _differ(one, other, tolerance, _named(program, number), "plain")):
            return failure
    return None


class Tolerance(NamedTuple):
    """How near two twins are. With infinite tolerances only what is not finite is compared."""

    relative: float = 0.0
    absolute: float = 0.0
    moments: tuple[float, float] = (0.0, 0.0)
    """The same of the optimizer's moments."""

    def of(self, name: str) -> tuple[float, float]:
        return self.moments if ".exp_avg" in name else (self.relative, self.absolute)


EXACT = Tolerance()
ROUNDED = Tolerance(1e-3, 2e-4, (1e-3, 2e-4))
FINITE = Tolerance(math.inf, math.inf, (math.inf, math.inf))


def _tolerances(program: Program) -> Iterator[Tolerance]:
    """Yields how near plain PyTorch an offloaded twin is at the beginning, behind each operation, and at the end."""
    foreign, narrow = program.optimizer != OURS, program.dtype == "bf16"
    tolerance = EXACT if foreign or narrow else ROUNDED
    if "scale" in program.model.layers:  # its transposed parameter lies contiguous: torch.matmul takes other kernels
        tolerance = FINITE if narrow else ROUNDED
        if foreign and "normed" in program.model.layers:
            tolerance = FINITE  # a bias that is normalised away has noise for a gradient, which Adagrad makes large
    if program.states == "8bit" or (narrow and program.max_grad_norm is not None):
        tolerance = FINITE
    yield tolerance
    for item in program.operations:
        if narrow and item.loosens and not (isinstance(item, Write) and item.is_seen()):
            tolerance = FINITE
        if (item.parts or program.late) and "stacked" in program.model.layers:
            # Plain PyTorch adds to gradients that share memory once for each; what is not in the optimizer yet is not
            # zeroed by it.
            tolerance = FINITE
        if isinstance(item, Switch) and item.how == OURS:
            tolerance = max(tolerance, ROUNDED)
        yield tolerance
    yield tolerance


def _named(program: Program, number: int) -> str:
    return ["offload", *map(repr, program.operations), "the end"][number]


def _outcomes(program: Program, way: Way | None, skipped: Sequence[Outcome] = ()) -> list[Outcome]:
    """Returns what the beginning, each operation and the end came to; the plain twin leaves out what was refused."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    twin = Twin(program, way)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return list(_run(twin, program, skipped))
    finally:
        twin.close()
        torch.set_num_threads(threads)


def _run(twin: Twin, program: Program, skipped: Sequence[Outcome]) -> Iterator[Outcome]:
    yield (begun := attempt(twin, twin.begin))
    if begun.error or len(skipped) == 1:  # it was refused
        return
    updates = program.updates
    for number, item in enumerate(program.operations, start=1):
        if item.parts and "in_backward" in updates:
            if twin.plain:
                return  # each layer is updated already, and plain PyTorch's are not
            if len(updates) > 1:
                yield Outcome()
                continue
        refused = skipped[number].stage if skipped and skipped[number].refused else ""
        twin.stop_at = refused
        torch.manual_seed(1000 + number)
        outcome = Outcome() if refused == "begin" else attempt(twin, functools.partial(item.run, twin))
        if refused not in ("", "begin") or (outcome.error and outcome.stage != "begin"):
            twin.losses.clear()
            twin.zero_grad()
            twin.model.zero_grad()  # and of what is in no group what a pass that was refused has left
        twin.take_writes()
        yield outcome
        if twin.plain and refused in ("backward", "step") and "in_backward" in updates:
            return
        if len(updates) > 1 and outcome.refused and outcome.stage in ("backward", "step"):
            return  # in_backward has updated the layers before the one whose gradient was not finite
    yield attempt(twin, lambda: final(twin, gradients_too="in_backward" not in updates))


def attempt(twin: Twin, task: Callable[[], Any]) -> Outcome:
    """Runs ``task``; returns what came of it."""
    twin.stage = "begin"
    try:
        return Outcome(value=task())
    except Skipped:
        return Outcome()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if "/stronghold/" in f.filename]
        frame = (ours or list(frames))[-1]
        place = f"{frame.filename.rpartition('/stronghold/')[2]}:{frame.name}"
        deliberate = isinstance(error, StrongholdError) or (
            isinstance(error, ValueError) and bool(ours) and ours[-1] is frames[-1]
        )
        return Outcome(
            error=type(error).__name__,
            message=str(error),
            place=place,
            refused=deliberate and not isinstance(error, (CorruptionError, DiskError)),
            stage=twin.stage,
        )


RAW = ("AssertionError", "AttributeError", "CorruptionError", "DiskError", "IndexError", "KeyError", "TypeError")


def _asks_for_deferred(outcome: Outcome) -> bool:
    """Whether it was refused for what update='in_backward' alone cannot do."""
    return outcome.refused and "use update='deferred'" in outcome.message


def _stale(outcome: Outcome) -> bool:
    """Whether it was refused because the weights of the forward pass are gone."""
    return outcome.refused and "must be the same in the backward pass" in outcome.message


def _is_raw(outcome: Outcome, where: str) -> Failure | None:
    if outcome.error not in RAW or outcome.place.startswith("/"):  # torch's own: plain PyTorch must raise it too
        return None
    return Failure(outcome.error, outcome.place, outcome.message, where)


def _differ(one: Outcome, other: Outcome, tolerance: Tolerance, where: str, beside: str) -> Failure | None:
    if one.error != other.error:
        raised = one if one.error else other
        who = "alone" if one.error else f"by {beside} alone"
        return Failure(f"{raised.error} {who}", raised.place, raised.message, where)
    difference = next(differences(one.value, other.value, tolerance), None)
    if difference is None:
        return None
    kind = "is finite or not, unlike" if difference.endswith(NOT_FINITE) else "differs from"
    return Failure(f"{kind} {beside}", "", difference, where)


NOT_FINITE = ", of which one is not finite"


def differences(one: Any, other: Any, tolerance: Tolerance, name: str = "") -> Iterator[str]:
    """Tells where two nested values differ; NaN equals NaN."""
    rtol, atol = tolerance.of(name)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape:
            yield f"{name}: {tuple(one.shape)} and {tuple(other.shape)}"
            return
        a, b = one.detach().double(), other.detach().double()
        if math.isinf(atol):
            bad = a.isfinite() != b.isfinite()
        else:
            bad = ~((a - b).abs() <= atol + rtol * b.abs()) & ~(a.isnan() & b.isnan()) & (a != b)
        if bad.any():
            where = tuple(bad.nonzero()[0].tolist())
            first, second = a[where], b[where]
            end = NOT_FINITE if first.isfinite() != second.isfinite() else ""
            yield f"{name}: {int(bad.sum())} of {bad.numel()}, first {first} and {second} at {list(where)}{end}"
    elif isinstance(one, dict) and isinstance(other, dict):
        if list(one) != list(other):
            yield f"{name}: {list(one)} and {list(other)}"
            return
        for key in one:
            yield from differences(one[key], other[key], tolerance, f"{name}.{key}")
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            yield f"{name}: {len(one)} and {len(other)} items"
            return
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from differences(a, b, tolerance, f"{name}[{number}]")
    elif isinstance(one, float) and isinstance(other, float):
        if not (math.isinf(atol) or abs(one - other) <= atol + rtol * abs(other) or one == other):
            yield f"{name}: {one} and {other}"
    elif one != other:
        yield f"{name}: {one!r} and {other!r}"
