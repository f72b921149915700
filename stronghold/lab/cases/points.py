"""What a case's figure shows: the measurements that belong to it, as points, and what the artifact measured."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stronghold.lab.cases.case import Case, Wanted
from stronghold.lab.cases.machines import V100, Machine
from stronghold.lab.cases.measurement import Limits, Measurement
from stronghold.lab.cases.published import PUBLISHED, WHERE, parameters


@dataclass(frozen=True, kw_only=True)
class Point:
    """One bar, or one place of a line: ``y`` with its spread, for what was ``wanted``.

    ``measurement`` is None for a number that was only published, as a table.
    """

    wanted: Wanted
    y: float
    low: float
    high: float
    parameters: int
    measurement: Measurement | None = None

    @property
    def wrong(self) -> str:
        return self.measurement.wrong if self.measurement else ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """The points of one machine. ``published`` tells what the artifact measured from what was measured here."""

    machine: str
    points: tuple[Point, ...]
    published: bool = False


@dataclass(frozen=True, kw_only=True)
class Shown:
    """All that a case shows: ``here`` is what was measured, if anything was, ``notes`` what is not there and why."""

    case: Case
    preset: Machine
    here: Panel | None
    published: Panel
    notes: tuple[str, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return (self.here, self.published) if self.here else (self.published,)


def show(case: Case, preset: Machine, measurements: Sequence[Measurement], *, on: str | None = None) -> Shown:
    """Returns what ``case`` shows of ``measurements``.

    Ours belong by the settings of ``preset``, the artifact's logs by the paper's. ``on`` is a part of a machine's name.
    Raises ValueError if what belongs was measured on several machines, and ``on`` does not choose one of them.
    """
    others = sum(not item.artifact and not item.has(preset.shape) for item in measurements)
    belong = list(_belonging(case, preset, measurements))
    ours = _on_one_machine(case, belong, on)
    logs = [item for item in measurements if item.artifact and item.has(V100.shape)]
    points, notes = _points(case, preset, ours)
    logged, _ = _points(case, V100, logs)
    published = Panel(machine=f"{WHERE}, its logs", points=logged, published=True) if logged else table_of(case)
    shown = {id(point.measurement) for point in (*points, *logged)}
    notes += [f"{m.source}: {m.note}" for m in (*ours, *logs) if m.note and id(m) in shown]
    if others:
        notes.append(f"{others} results have other settings than those of --machine {preset.name}")
    elsewhere = Counter(item.machine for item in belong if item.machine != ours[0].machine)
    notes += [f"{count} results are left out: measured on {machine}" for machine, count in sorted(elsewhere.items())]
    here = Panel(machine=ours[0].machine, points=points) if points else None
    return Shown(case=case, preset=preset, here=here, published=published, notes=tuple(dict.fromkeys(notes)))


def machines_of(case: Case, preset: Machine, measurements: Iterable[Measurement]) -> list[str]:
    """Returns, in words, each machine that results of ``case`` in the settings of ``preset`` were measured on."""
    return sorted({item.machine for item in _belonging(case, preset, measurements)})


def table_of(case: Case) -> Panel:
    """Returns the numbers of the artifact's tables."""
    points = tuple(
        Point(wanted=wanted, y=y, low=y, high=y, parameters=parameters(wanted.layers))
        for wanted, y in PUBLISHED[case.number].items()
    )
    return Panel(machine=WHERE, points=points, published=True)


def largest_models(preset: Machine, measurements: Iterable[Measurement]) -> dict[str, Measurement]:
    """Returns each method's largest model that trained, of trials under the limits of ``preset``."""
    best: dict[str, Measurement] = {}
    for item in measurements:
        if _is_trial(preset, item) and not item.reason and item.layers > getattr(best.get(item.method), "layers", 0):
            best[item.method] = item
    return best


def layers_of_largest(preset: Machine, measurements: Iterable[Measurement]) -> dict[str, int]:
    """Returns the layers of each method's largest model: as case 1 found them, else as ``preset`` has them."""
    found = largest_models(preset, measurements)
    return {**preset.largest, **{method: item.layers for method, item in found.items()}}


def limits_of(preset: Machine) -> Limits:
    """Returns the limits that a trial of ``preset`` has."""
    return Limits(device_bytes=preset.device_limit, host_bytes=preset.host_limit)


def _is_trial(preset: Machine, item: Measurement) -> bool:
    return item.artifact or item.limits == limits_of(preset)


def _belonging(case: Case, preset: Machine, measurements: Iterable[Measurement]) -> Iterator[Measurement]:
    """Yields what a case needs of one machine: its own runs, and the trials that say how large the models are."""
    for item in measurements:
        if item.artifact or not item.has(preset.shape):
            continue
        if item.limits is None:
            wanted = not case.largest
        else:
            wanted = _is_trial(preset, item) and (case.largest or case.x in ("baseline", "method"))
        if wanted:
            yield item


def _on_one_machine(case: Case, items: list[Measurement], on: str | None) -> list[Measurement]:
    machines = sorted({item.machine for item in items})
    chosen = [machine for machine in machines if on is None or on in machine]
    chosen = [on] if on in machines else chosen  # a host's name is a part of that with its GPU
    if len(chosen) == 1 or not machines:
        return [item for item in items if item.machine in chosen]
    what = "that name fits" if on is not None else "they are of"
    raise ValueError(
        f"the results of case {case.number} must be of one machine ({what} {len(chosen)} of "
        f"{'; '.join(map(repr, machines))}); pass --measured-on with a part of one name"
    )


def _points(case: Case, preset: Machine, items: Sequence[Measurement]) -> tuple[tuple[Point, ...], list[str]]:
    """Returns a case's points in the order of its runs, and notes on what is not there."""
    if case.largest:
        return _largest_points(preset, items)
    wanted = list(case.runs(preset, layers_of_largest(preset, items)))
    runs = [item for item in items if item.limits is None]
    if case.varies and wanted:
        values = sorted({value for item in runs if (value := _value(case, wanted[0], item)) is not None})
        missing = [run for run in wanted if getattr(run, case.x) not in values]
        wanted = [wanted[0]._replace(**{case.x: value}) for value in values]
    else:
        missing = []
    points, notes = [], []
    for run in wanted:
        same = [item for item in runs if _matches(item, run)]
        if not same:
            missing.append(run)
            continue
        # Of those that came to their end, on one machine, if any did.
        newest = max(same, key=lambda item: (not item.note, item.time))
        if len(same) > 1:
            notes.append(f"{in_words(run)}: {len(same)} runs, the newest is shown ({newest.source})")
        points.append(_point(case, run, newest))
    notes += [f"{in_words(run)}: no run of it yet" for run in missing] if points else []
    return tuple(points), notes


def _largest_points(preset: Machine, items: Sequence[Measurement]) -> tuple[tuple[Point, ...], list[str]]:
    best = largest_models(preset, items)
    trials = [item for item in items if _is_trial(preset, item)]
    points, notes = [], []
    for method in sorted({item.method for item in trials} | set(preset.methods), key=_order(preset.methods)):
        failed = [item for item in trials if item.method == method and item.reason]
        if method in best:
            points.append(_value_point(Wanted(method, best[method].layers), best[method], best[method].parameters))
            if best[method].layers == preset.most:
                notes.append(f"{method}: {preset.most} layers are the most that were tried")
            above = [item for item in failed if item.layers > best[method].layers]
            if above:
                least = min(above, key=lambda item: item.layers)
                notes.append(f"{in_words(Wanted(method, least.layers))}: {least.reason}")
        elif failed:
            least = min(failed, key=lambda item: item.layers)
            points.append(_value_point(Wanted(method, 0), least, 0))
            notes.append(f"{in_words(Wanted(method, least.layers))}: {least.reason}")
        elif trials:
            notes.append(f"{method}: no trial of it yet")
    return tuple(points), notes


def _point(case: Case, run: Wanted, item: Measurement) -> Point:
    if case.y == "iteration_s":
        return replace(_value_point(run, item, item.iteration_s), low=item.low, high=item.high)
    batch = item.samples_per_s * item.iteration_s
    return replace(_value_point(run, item, item.samples_per_s), low=batch / item.high, high=batch / item.low)


def _value_point(run: Wanted, item: Measurement, y: float) -> Point:
    return Point(wanted=run, y=y, low=y, high=y, parameters=item.parameters, measurement=item)


def _value(case: Case, run: Wanted, item: Measurement) -> Any:
    """Returns where on the case's axis ``item`` stands; None if it is not one of its runs."""
    value = getattr(item, case.x)
    return value if value is not None and _matches(item, run._replace(**{case.x: value})) else None


def _matches(item: Measurement, run: Wanted) -> bool:
    return (item.method, item.layers, item.window) == (run.method, run.layers, run.window)


def _order(methods: Sequence[str]) -> Any:
    """Returns the key that sorts by ``methods``, what is not among them after the others."""
    places: Mapping[str, int] = {method: place for place, method in enumerate(methods)}
    return lambda method: (places.get(method, math.inf), method)


def in_words(run: Wanted) -> str:
    """Returns a run as notes name it: ``stronghold, 32 layers, window 15``."""
    window = f", window {run.window}" if run.window is not None else ""
    return f"{run.method}, {run.layers} layers{window}"


def missing_runs(case: Case, preset: Machine, measurements: Sequence[Measurement]) -> Iterator[Wanted]:
    """Yields the runs of a case, each once, that ``measurements`` do not have."""
    ours = [item for item in measurements if not item.artifact and item.has(preset.shape)]
    runs = case.runs(preset, layers_of_largest(preset, ours))
    for wanted in dict.fromkeys(run._replace(group="") for run in runs):
        if not any(item.limits is None and _matches(item, wanted) for item in ours):
            yield wanted
