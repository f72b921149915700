"""Results in any of their formats as measurements, and what had to be left out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stronghold.lab.cases.artifact import is_artifact_log, read_artifact_log
from stronghold.lab.cases.measurement import Measurement, from_record
from stronghold.lab.outputs import LOG_NAME, RUNS_NAME, TEXTS, TRIALS_NAME
from stronghold.lab.records.hardware import moves_of
from stronghold.lab.records.json_lines import Record, read_records
from stronghold.lab.records.runs import read_run, summarize, to_float

RUNS, TRIALS = RUNS_NAME, TRIALS_NAME
Compare = Callable[[Sequence[Record]], Sequence[object]]
"""Gives for each record of a run what its losses have wrong, in words by ``str()``, or None."""


@dataclass(frozen=True, kw_only=True)
class Results:
    """What was read, and notes on what was not, each with its source and the reason."""

    measurements: tuple[Measurement, ...]
    notes: tuple[str, ...]


def read_results(paths: Sequence[str | Path], compare: Compare | None = None) -> Results:
    """Reads folders and files, each once.

    A path is a folder with runs.jsonl, trials.jsonl or log_*.txt, a file of JSON lines, a run's folder or log.jsonl, or
    a log of the artifact. What ``compare`` says of a record is what is wrong with its run. Raises ValueError if one of
    ``paths`` does not exist.
    """
    reader = _Reader()
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"results must be a folder or a file that exists (got {str(path)!r}); pass another")
        if not path.is_dir() or (path / LOG_NAME).exists():
            reader.read(path)
            continue
        for file in [path / RUNS, path / TRIALS, *sorted(path.glob(TEXTS))]:
            if file.exists():
                reader.read(file, in_folder=True)
    if compare is not None:
        reader.mark(compare)
    return Results(measurements=tuple(reader.measurements.values()), notes=tuple(dict.fromkeys(reader.notes)))


class _Reader:
    """Gathers measurements and the records that they are of, both by their source, and notes."""

    def __init__(self) -> None:
        self.measurements: dict[str, Measurement] = {}
        self.notes: list[str] = []
        self._records: dict[str, Record] = {}

    def read(self, path: Path, *, in_folder: bool = False) -> None:
        """Adds what is at ``path``. A log of ours to read, in a folder, is passed by: its record is in runs.jsonl."""
        try:
            if path.is_dir() or path.name == LOG_NAME:
                self._add(_record_of_run(path), str(path))
            elif path.suffix == ".jsonl":
                found = read_records(path)
                self.notes += [found.truncated] if found.truncated else []
                for number, record in enumerate(found.records, start=1):
                    self._add(record, f"{path}, record {number}")
            else:
                self._add_text(path, in_folder)
        except OSError as error:
            self.notes.append(f"{path} is left out: {error.strerror}")
        except ValueError as error:
            self.notes.append(f"{path} is left out: {error}")

    def mark(self, compare: Compare) -> None:
        """Marks what ``compare`` finds wrong in the records."""
        for source, wrong in zip(self._records, compare(list(self._records.values())), strict=True):
            if wrong is not None and not self.measurements[source].wrong:
                self.measurements[source] = replace(self.measurements[source], wrong=str(wrong))

    def _add(self, record: Record, source: str) -> None:
        try:
            self.measurements[source] = from_record(record, source)
            self._records[source] = record
        except (ValueError, TypeError, KeyError) as error:
            self.notes.append(f"{source} is left out: {error}")

    def _add_text(self, path: Path, in_folder: bool) -> None:
        text = path.read_text(errors="replace")
        if text.startswith("settings  ") or text.partition("\n")[0].rstrip() == "methods":  # of a run, of a comparison
            if not in_folder:
                raise ValueError(f"it is a log for people; the run's numbers are in {RUNS} and its {LOG_NAME}")
        elif not is_artifact_log(text):
            raise ValueError("it is no log of a run, or was cut short before it said anything")
        else:
            self.measurements[str(path)] = read_artifact_log(path, text)


def _record_of_run(path: Path) -> Record:
    """Returns the record of a log.jsonl; a run that was cut short counts as far as it came."""
    run = read_run(path)
    if not run.steps:
        raise ValueError("it was cut short before its first step")
    try:
        summary = summarize(run.start, run.steps).record()
    except KeyError as error:
        raise ValueError(f"it has no {error}: a log of an older format") from error
    interrupted = len(run.steps) != run.start["settings"].get("steps")
    losses = [to_float(step["loss"]) for step in run.steps]
    return {**run.start, "summary": summary, "losses": losses, "interrupted": interrupted, "moves": list(moves_of(run))}
