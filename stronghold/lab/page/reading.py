"""What a folder of results says of its runs, and what of it cannot be shown."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stronghold.lab.outputs import LOG_NAME, RUNS_NAME, TIMELINE_NAME
from stronghold.lab.records.agreement import TOLERANCE, disagreements
from stronghold.lab.records.hardware import hardware_of, moves_of
from stronghold.lab.records.json_lines import Record, read_records
from stronghold.lab.records.runs import read_run, summarize, to_float
from stronghold.lab.records.timeline import read_spans
from stronghold.spans import Span

_NAMED = 5
"""Runs that a note names; it counts the rest."""
_ENDED = {True: "interrupted", False: "complete"}


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run: its record, and its steps and ``folder`` where its log is there.

    ``ended`` tells how: "complete", "interrupted", "failed" or "refused" of a method that a comparison could not
    train, or "no end recorded" of a run that was killed or still goes on. ``wrong`` is why ``losses`` are not to be
    trusted.
    """

    name: str
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    parameters: Any
    summary: Mapping[str, Any]
    ended: str
    steps: tuple[Record, ...] = ()
    folder: Path | None = None
    losses: tuple[float, ...] = ()
    wrong: str = ""
    failed: bool = False

    @property
    def time(self) -> str:
        """When it began, in UTC by ISO 8601: earlier is smaller. Empty where that is not recorded."""
        return str(self.machine.get("time") or "")

    @property
    def hardware(self) -> str:
        """What it ran on, in words: runs are beside one another only where this is the same."""
        return hardware_of({"settings": self.settings, "machine": self.machine})

    @property
    def timeline(self) -> Path | None:
        """The file of the timeline of one of its steps, if one was recorded."""
        path = self.folder / TIMELINE_NAME if self.folder else None
        return path if path and path.is_file() else None


@dataclass(frozen=True, kw_only=True)
class PageResults:
    """The runs, oldest first, and ``notes`` on what is left out or lacks something, each with its reason."""

    runs: tuple[RecordedRun, ...]
    notes: tuple[str, ...]


@dataclass
class _Found:
    runs: dict[tuple[str, str], RecordedRun] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_page_results(folder: str | Path) -> PageResults:
    """Reads the runs of ``folder``/runs.jsonl and those that have a log in it, in a folder in it, or in its runs/.

    Those of a comparison of methods are in a folder together, and have its name before theirs. What a run's own log
    says is taken before its line in runs.jsonl. Raises ValueError if there is no run.
    """
    folder = Path(folder)
    found = _Found()
    if not folder.is_dir():
        raise ValueError(f"results must be a folder that exists (got {str(folder)!r}); pass the folder of your results")
    _read_records(folder / RUNS_NAME, found)
    for path in _run_folders(folder):
        _read_log(path, found)
    if not found.runs:
        skipped = f": {found.notes[0]}" if found.notes else ""
        raise ValueError(
            f"results must have a {RUNS_NAME} with a run, or a run's folder with a {LOG_NAME} (got none in "
            f"{str(folder)!r}{skipped}); pass the folder of your runs, or train first"
        )
    runs = _marked(sorted(found.runs.values(), key=lambda run: (run.time, run.name)))
    found.notes += [f"{run.name} is WRONG: {run.wrong}" for run in runs if run.wrong]
    without = [run.name for run in runs if run.folder is None and not run.failed]
    if without:
        found.notes.append(f"no curves of {_names(without)}: there is no {LOG_NAME} of theirs in {folder}")
    return PageResults(runs=tuple(runs), notes=tuple(dict.fromkeys(found.notes)))


def find_timeline(
    results: PageResults, name: str | None = None
) -> tuple[RecordedRun | None, list[Span], tuple[str, ...]]:
    """Returns the newest run that has a readable timeline, or the one called ``name``; its spans; notes on others.

    Without a timeline the spans are empty, and without a run called so ValueError is raised.
    """
    notes = []
    runs = [run for run in results.runs if name in (None, run.name)]
    if not runs:
        raise ValueError(
            f"there must be a run of the name given (got --run {name!r}, the results have "
            f"{_names([run.name for run in results.runs])}); pass one of theirs"
        )
    for run in reversed(runs):
        if run.timeline is None:
            continue
        try:
            spans = read_spans(run.timeline)
        except ValueError as error:
            notes.append(f"{run.name}: {error}")
            continue
        if spans:
            return run, spans, tuple(notes)
        notes.append(f"{run.timeline} has no spans and is left out")
    where = f"the folder of {name}" if name else "any run's folder"
    notes.append(f"no timeline recorded: there is none to read in {where} ({TIMELINE_NAME})")
    return runs[-1] if name else None, [], tuple(notes)


def _run_folders(folder: Path) -> Iterator[Path]:
    if (folder / LOG_NAME).is_file():
        yield folder
    for pattern in (f"*/{LOG_NAME}", f"*/*/{LOG_NAME}", f"runs/*/*/{LOG_NAME}"):
        yield from (path.parent for path in sorted(folder.glob(pattern)) if not _is_process_of_run(path.parent))


def _is_process_of_run(folder: Path) -> bool:
    """Whether a run's other process writes its log there."""
    return re.fullmatch(r"process-\d+", folder.name) is not None and (folder.parent / LOG_NAME).is_file()


def _read_records(path: Path, found: _Found) -> None:
    if not path.is_file():
        return
    try:
        read = read_records(path, skip_damaged=True)
    except ValueError as error:
        found.notes.append(f"{path} is left out: {error}")
        return
    found.notes += [*read.damaged, *filter(None, [read.truncated])]
    for number, record in enumerate(read.records, start=1):
        source = f"{path}, record {number}"
        settings, summary = record.get("settings"), record.get("summary")
        failure = str(record.get("error") or "")
        needed = (("settings", settings), *([("summary", summary)] if not failure else []))
        lacks = [name for name, value in needed if not _mapping(value)]
        if lacks:
            found.notes.append(f"{source} is left out: it has no {' and no '.join(lacks)}")
            continue
        run = _recorded(_name(Path(str(_mapping(settings).get("out") or "")), settings) or source, record)
        if failure:
            found.notes.append(f"{run.name} {failure}")
        if (run.name, run.hardware) in found.runs:
            found.notes.append(f"{run.name} is in {path} more than once: the last record counts")
        found.runs[run.name, run.hardware] = run


def _read_log(folder: Path, found: _Found) -> None:
    try:
        log = read_run(folder)
    except ValueError as error:
        found.notes.append(f"{folder} is left out: {error}")
        return
    if log.truncated:
        found.notes.append(log.truncated)
    try:
        summary = (log.end or {}).get("summary") or summarize(log.start, log.steps).record()
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        reason = "it has no step" if not log.steps else f"it lacks {error}: a log of another or an older form"
        found.notes.append(f"{folder} is left out: {reason}")
        return
    interrupted = None if log.end is None else log.end.get("interrupted")
    record = {**log.start, "summary": summary, "interrupted": interrupted}
    run = _recorded(_name(folder, log.start["settings"]) or log.name, record, steps=log.steps, folder=folder)
    before = found.runs.get((run.name, run.hardware))
    if log.end is None and before is not None and before.failed:
        run = replace(run, ended=before.ended)
    elif log.end is None:
        found.notes.append(f"{run.name} has {run.ended}: it was killed, or still goes on after step {len(log.steps)}")
    found.notes += [f"{run.name} {move}" for move in moves_of(log)]
    found.runs[run.name, run.hardware] = run


def _name(folder: Path, settings: Any) -> str:
    """Returns a run's name, that of its folder; of one in a comparison, whose folder is its method's, both folders'."""
    own = folder.name == _mapping(settings).get("method")
    return "/".join(filter(None, (folder.parent.name, folder.name))) if own else folder.name


def _marked(runs: Iterable[RecordedRun]) -> list[RecordedRun]:
    """Returns ``runs`` with what is wrong with their losses, where there is a resident run beside them."""
    marked = list(runs)
    places = [place for place, run in enumerate(marked) if run.losses and _comparable(run.settings)]
    compared = [{"settings": marked[place].settings, "losses": marked[place].losses} for place in places]
    for place, wrong in zip(places, disagreements(compared), strict=True):
        if wrong is not None:
            marked[place] = replace(marked[place], wrong=str(wrong))
    return marked


def _comparable(settings: Mapping[str, Any]) -> bool:
    return "method" in settings and settings.get("dtype") in TOLERANCE


def _losses(record: Record, steps: Iterable[Record]) -> tuple[float, ...]:
    """Returns the loss of each step, none where one cannot be read."""
    recorded = record.get("losses")
    found = [step["loss"] for step in steps] or (recorded if isinstance(recorded, list) else [])
    try:
        return tuple(map(to_float, found))
    except (TypeError, ValueError):
        return ()


def _recorded(name: str, record: Record, **log: Any) -> RecordedRun:
    interrupted, failed = record.get("interrupted"), str(record.get("error") or "").partition(": ")[0]
    ended = _ENDED[interrupted] if isinstance(interrupted, bool) else failed or "no end recorded"
    return RecordedRun(
        name=name,
        settings=_mapping(record.get("settings")),
        machine=_mapping(record.get("machine")),
        parameters=record.get("parameters"),
        summary=_mapping(record.get("summary")),
        ended=ended,
        losses=_losses(record, log.get("steps", ())),
        failed=bool(failed),
        **log,
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
