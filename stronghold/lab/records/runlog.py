"""What a run writes while it trains: JSON lines, TensorBoard events, a log to read."""

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from stronghold.lab.outputs import LOG_NAME
from stronghold.lab.records.json_lines import Record, read_records, to_line
from stronghold.lab.records.runs import Summary
from stronghold.units import format_bytes, format_seconds


class RunLog:
    """Writes a run's records to ``folder``/log.jsonl and as TensorBoard events beside it.

    ``text`` is a second log, to be read by people. Every record is handed to the system before the call
    returns, so a killed run loses none. With ``after`` the run in ``folder`` goes on after that step: its records up to
    there are kept, as ``steps`` among others, and later ones dropped; ``lost`` says which of these steps have none, ""
    where all have one. Raises ValueError if ``folder`` holds a run otherwise, and OSError with the file's name wherever
    one cannot be written.
    """

    def __init__(self, folder: str | Path, *, text: str | Path | None = None, after: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imports for seconds

        self.folder = Path(folder)
        path = self.folder / LOG_NAME
        kept: list[Record] = []
        if after is None:
            check_run_folder(folder)
        elif path.exists():
            kept = _up_to(after, read_records(path).records)
            _rewrite(path, kept)
        self.steps = [record for record in kept if record.get("event") == "step"]
        self.lost = _lost(path, self.steps, after or 0)
        self._after = after if kept else None
        self._text = _open(Path(text), "a" if after else "w") if text is not None else None
        self._json = _open(path, "w" if after is None else "a")
        self._told = threading.excepthook
        self._tells: Callable[[threading.ExceptHookArgs], Any] = partial(_unless_raised, self._told)
        threading.excepthook = self._tells
        try:
            self._events = SummaryWriter(str(self.folder), purge_step=None if after is None else after + 1)
        except OSError as error:
            self._tell_again()
            raise _named(error, self.folder) from error

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except OSError:
            if kind is None:  # the error that ends the run is the one to tell
                raise

    def start(self, record: Mapping[str, Any]) -> None:
        """Writes the run's settings, machine and parameter count; of a run that goes on, as ``resume``."""
        event = {"event": "start"} if self._after is None else {"event": "resume", "step": self._after}
        self._write_record({**event, **record})
        for section in ("settings", "machine"):
            for name, value in record[section].items():
                shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
                self._write_text(f"{section:<9} {name:<18} {shown}")
        self._write_text(f"{'model':<9} {'parameters':<18} {record['parameters']}")

    def step(self, record: Mapping[str, Any]) -> None:
        """Writes one step: its number, loss, rate, times in seconds and bytes."""
        self._write_record({"event": "step", **record})
        self._write_text(
            f"step {record['step']:>6}  loss {record['loss']:.6f}  lr {record['lr']:.3e}  "
            f"iteration {format_seconds(record['iteration_s'])}  "
            f"samples/s {record['batch'] / record['iteration_s']:.4g}  "
            f"device {format_bytes(record['device_bytes'])}  host {format_bytes(record['host_bytes'])}"
        )
        try:
            for name, value in record.items():
                if name != "step" and isinstance(value, int | float):
                    group = "step" if name in ("loss", "lr") else name.rsplit("_", 1)[-1]
                    self._events.add_scalar(f"{group}/{name}", value, record["step"])
        except OSError as error:
            raise _named(error, self.folder) from error

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Writes the loss on rows that are not trained on: the ``step`` that it is behind, ``loss``, ``eval_s``."""
        self._write_record({"event": "evaluation", **record})
        self._write_text(f"evaluation behind step {record['step']}  loss {record['loss']:.6f}")
        try:
            self._events.add_scalar("evaluation/loss", record["loss"], record["step"])
        except OSError as error:
            raise _named(error, self.folder) from error

    def end(self, record: Mapping[str, Any], summary: Summary) -> None:
        """Writes the run's summary, and what ``record`` adds to it."""
        self._write_record({"event": "end", **record, "summary": summary.record()})
        for section, name, value in summary.rows():
            self._write_text(f"{section:<9} {name:<38} {value}")

    def checkpoint(self, record: Mapping[str, Any]) -> None:
        """Writes that a checkpoint was saved: its step, its path, and the time it took in seconds."""
        self._write_record({"event": "checkpoint", **record})
        self._write_text(f"checkpoint {record['path']} in {format_seconds(record['save_s'])}")

    def sync(self) -> None:
        """Blocks until the records are on disk."""
        os.fsync(self._json.fileno())

    def close(self) -> None:
        """Flushes and closes all of them; the first error is raised, after all were tried."""
        errors = []
        for close, path in (
            (self._events.close, self.folder),
            (self._json.close, self._json.name),
            (self._text.close if self._text else None, self._text.name if self._text else None),
        ):
            try:
                if close is not None:
                    close()
            except OSError as error:
                errors.append(_named(error, path))
        self._tell_again()
        if errors:
            raise errors[0]

    def _tell_again(self) -> None:
        """Puts back what tells of threads' errors, unless another has come since."""
        if threading.excepthook is self._tells:
            threading.excepthook = self._told

    def _write_record(self, record: Mapping[str, Any]) -> None:
        _write(self._json, to_line(record))

    def _write_text(self, line: str) -> None:
        if self._text is not None:
            _write(self._text, line + "\n")


def check_run_folder(folder: str | Path) -> None:
    """Raises ValueError if ``folder`` holds a run already."""
    if (Path(folder) / LOG_NAME).exists():
        raise ValueError(
            f"a run's folder must not hold another run (got {str(folder)!r}, which has a {LOG_NAME}); "
            "pass another folder, or remove that one"
        )


def check_told(settings: Mapping[str, Any]) -> None:
    """Raises ValueError for one of the ``settings`` that is, or has, a path that is not UTF-8, as a run's log is."""
    for value in settings.values():
        for text in value if isinstance(value, tuple | list) else (value,):
            if isinstance(text, str) and not _is_utf_8(text):
                raise ValueError(
                    f"a run's paths must be UTF-8, for its log tells them (got {text!r}); rename that file or folder"
                )


def check_begins_anew(folder: str | Path) -> None:
    """Raises ValueError where ``folder``, without a whole checkpoint, holds a run that is complete or never kept any.

    What is left of one that died before its first checkpoint is not: it begins anew.
    """
    path = Path(folder) / LOG_NAME
    records = read_records(path).records if path.exists() else ()
    events = [record.get("event") for record in records]
    kept = any(r.get("event") == "start" and r["settings"].get("checkpoint_every") is not None for r in records)
    if "end" in events or ("step" in events and not kept):
        raise ValueError(
            f"a run goes on from a checkpoint (got {str(folder)!r}, which has a {LOG_NAME} and no whole checkpoint, so "
            "that its run would be overwritten); pass another folder, or remove that one"
        )


def to_go_on(out: str | Path) -> str:
    """Returns what is said of a run in the folder ``out`` that ends before its last step, and has a checkpoint."""
    return f"to go on: the same command with --resume --out {out}"


def _is_utf_8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a name of other bytes, which Python has as surrogates
        return False
    return True


def _open(path: Path, mode: str) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open(mode, encoding="utf-8")
    except OSError as error:
        raise _named(error, path) from error


def _up_to(step: int, records: Sequence[Record]) -> list[Record]:
    """Returns what a log had when ``step`` was done: nothing before the first one."""
    return [r for r in records if step and r.get("event") != "end" and r.get("step", 0) <= step]


def _lost(path: Path, steps: Sequence[Record], after: int) -> str:
    """Returns what is said of steps up to ``after`` whose records are gone, as of a log that was cut."""
    gone = sorted(set(range(1, after + 1)) - {step["step"] for step in steps})
    if not gone:
        return ""
    which = f"step {gone[0]}" if len(gone) == 1 else f"{len(gone):,} steps between {gone[0]} and {gone[-1]}"
    return (
        f"note       {path} has lost the records of {which}, whose training the checkpoint has: pictures and the "
        "summary are without them"
    )


def _rewrite(path: Path, records: Sequence[Record]) -> None:
    """Replaces a log, at once: whoever is killed here leaves the old one or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(map(to_line, records))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise _named(error, path) from error


def _write(file: IO[str], text: str) -> None:
    try:
        file.write(text)
        file.flush()
    except OSError as error:
        raise _named(error, file.name) from error


def _named(error: OSError, path: Any) -> OSError:
    return OSError(error.errno, f"cannot write the log ({error.strerror})", str(path))


def _unless_raised(before: Callable[[threading.ExceptHookArgs], Any], error: threading.ExceptHookArgs) -> None:
    """Tells of a thread's error as ``before`` did, but not of one that TensorBoard raises again where it is called."""
    if not (isinstance(error.exc_value, OSError) and type(error.thread).__name__ == "_AsyncWriterThread"):
        before(error)
