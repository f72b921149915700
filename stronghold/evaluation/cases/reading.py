"""Results in any of their formats as measurements, and what had to be left out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stronghold.evaluation.cases.artifact import is_artifact_log, read_artifact_log
from stronghold.evaluation.cases.measurement import Measurement, from_record
from stronghold.evaluation.records import Record, read_records
from stronghold.evaluation.runs import LOG_NAME, read_run, summarize

RUNS, TRIALS = "runs.jsonl", "trials.jsonl"


@dataclass(frozen=True, kw_only=True)
class Results:
    """What was read, and notes on what was not, each with its source and the reason."""

    measurements: tuple[Measurement, ...]
    notes: tuple[str, ...]


def read_results(paths: Sequence[str | Path]) -> Results:
    """Reads folders and files, each once.

    A path is a folder with runs.jsonl, trials.jsonl or log_*.txt, a file of JSON lines, a run's folder or log.jsonl, or
    a log of the artifact. Raises ValueError if one of ``paths`` does not exist.
    """
    measurements: list[Measurement] = []
    notes: list[str] = []
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"results must be a folder or a file that exists (got {str(path)!r}); pass another")
        if not path.is_dir() or (path / LOG_NAME).exists():
            _read(path, measurements, notes)
            continue
        for file in [path / RUNS, path / TRIALS, *sorted(path.glob("log_*.txt"))]:
            if file.exists():
                _read(file, measurements, notes, in_folder=True)
    sources = {item.source: item for item in measurements}
    return Results(measurements=tuple(sources.values()), notes=tuple(dict.fromkeys(notes)))


def _read(path: Path, measurements: list[Measurement], notes: list[str], *, in_folder: bool = False) -> None:
    """Adds what is at ``path``. A log of ours to read, in a folder, is passed by: its record is in runs.jsonl."""
    try:
        if path.is_dir() or path.name == LOG_NAME:
            measurements.append(_read_run(path))
        elif path.suffix == ".jsonl":
            found = read_records(path)
            if found.truncated:
                notes.append(found.truncated)
            for number, record in enumerate(found.records, start=1):
                _read_record(record, f"{path}, record {number}", measurements, notes)
        else:
            text = path.read_text(errors="replace")
            if text.startswith("settings  "):
                if not in_folder:
                    raise ValueError(f"it is a log for people; the run's numbers are in {RUNS} and its {LOG_NAME}")
            elif not is_artifact_log(text):
                raise ValueError("it is no log of a run, or was cut short before it said anything")
            else:
                measurements.append(read_artifact_log(path, text))
    except OSError as error:
        notes.append(f"{path} is left out: {error.strerror}")
    except ValueError as error:
        notes.append(f"{path} is left out: {error}")


def _read_record(record: Record, source: str, measurements: list[Measurement], notes: list[str]) -> None:
    try:
        measurements.append(from_record(record, source))
    except (ValueError, TypeError, KeyError) as error:
        notes.append(f"{source} is left out: {error}")


def _read_run(path: Path) -> Measurement:
    """Returns the run of a log.jsonl; one that was cut short counts as far as it came."""
    run = read_run(path)
    if not run.steps:
        raise ValueError("it was cut short before its first step")
    try:
        summary = summarize(run.start, run.steps).record()
    except KeyError as error:
        raise ValueError(f"it has no {error}: a log of an older format") from error
    wanted = run.start["settings"].get("steps")
    interrupted = len(run.steps) != wanted
    measurement = from_record({**run.start, "summary": summary, "interrupted": interrupted}, str(path))
    return measurement
