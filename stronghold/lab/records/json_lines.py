"""Results as data: JSON lines, one object each, and the machine that they were measured on."""

import errno
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Records:
    """What a file of JSON lines holds. ``truncated`` tells of a last line that was cut off, ``damaged`` of others."""

    records: tuple[Record, ...]
    truncated: str = ""
    damaged: tuple[str, ...] = ()


def to_line(record: Mapping[str, Any]) -> str:
    """Returns ``record`` as one line of JSON, newline included; NaN and infinities become their names.

    JSON has no such numbers, and a reader other than Python's would refuse the whole line.
    """
    return json.dumps(_plain(record), allow_nan=False, ensure_ascii=False) + "\n"


def check_records(path: str | Path | None) -> None:
    """Raises ValueError, naming it, for a file at ``path`` that a record cannot follow, for its last line is no record.

    None, and a file that is not there, are none. Nothing is changed. Raises OSError for a file that cannot be read.
    """
    if path is not None and os.path.isfile(path):
        with open(path, "rb") as file:
            _last_line(file)


def append_record(path: str | Path, record: Mapping[str, Any]) -> None:
    """Appends one record to the file at ``path``, which it makes if need be with its folder.

    A last line that a crash has cut off goes, as read_records leaves it out. Raises ValueError as check_records does,
    and OSError with the file's name where it cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            _end_last_line(file)
            file.write(to_line(record).encode())
    except OSError as error:
        raise OSError(error.errno, f"cannot write the record ({error.strerror})", str(path)) from error


def read_records(path: str | Path, *, skip_damaged: bool = False) -> Records:
    """Reads a file of JSON lines. A last line that was cut off is left out, and said; with ``skip_damaged`` others too.

    Raises ValueError, naming file and line, for any other line that is not a JSON object, and for a file that
    cannot be read.
    """
    path = Path(path)
    try:
        if not (path.is_file() or path.is_dir()) and path.exists():  # a named pipe, say, which would be waited for
            raise OSError(errno.EINVAL, "not a regular file")
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(
            f"a record file must be readable (got {error.strerror} for {str(path)!r}); pass another path"
        ) from error
    records: list[Record] = []
    truncated, damaged = "", []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError(f"a {type(record).__name__}")
        except ValueError as error:
            if number == len(lines):  # no newline after it: whoever wrote it was stopped
                truncated = f"{path}:{number} was cut off and is left out"
                break
            if skip_damaged:
                damaged.append(f"{path}:{number} is no JSON object ({error}) and is left out")
                continue
            raise ValueError(
                f"each line of a record file must be a JSON object (at {path}:{number}: {error}); remove that line"
            ) from error
        records.append(record)
    return Records(records=tuple(records), truncated=truncated, damaged=tuple(damaged))


def describe_machine(packages: Sequence[str] = ()) -> Record:
    """Returns what a measurement depends on besides its settings: time, hardware, versions, commit.

    ``packages`` are those that take part besides stronghold's own; one that is not installed has the version None.
    Memory is in bytes; ``commit`` is None outside a git checkout and ends in "-dirty" if files other than results were
    changed: a run that appends to them is of the same commit as the next.
    """
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_bytes": _memory_bytes(),
            "system": platform.platform(),
        },
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "transformers": _version("transformers"),
            "stronghold": _version("stronghold"),
            **{package: _version(package) for package in packages},
        },
        "threads": torch.get_num_threads(),
        "commit": _commit(Path(__file__).resolve().parent),
    }


def _end_last_line(file: IO[bytes]) -> None:
    begin, whole = _last_line(file)
    if not whole:
        file.truncate(begin)
    elif begin is not None:
        file.write(b"\n")


def _last_line(file: IO[bytes]) -> tuple[int | None, bool]:
    """Returns where the last line begins, None where it has its newline or there is none, and whether it is whole.

    Raises ValueError for one that is no JSON, nor the beginning of an object.
    """
    size = file.seek(0, os.SEEK_END)
    if not size or (file.seek(size - 1), file.read(1))[1] == b"\n":
        return None, True
    file.seek(0)
    content = file.read()
    begin = content.rfind(b"\n") + 1
    line = content[begin:].strip()
    try:
        json.loads(line)
    except ValueError as error:
        if line and not line.startswith(b"{"):
            raise ValueError(
                f"a file of records has one JSON object a line (got {str(file.name)!r}, whose last line is none: "
                f"{error}); pass another file, or mend that line"
            ) from error
        return begin, False
    return begin, True


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return "nan" if value != value else ("inf" if value > 0 else "-inf")
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit(folder: Path) -> str | None:
    try:
        commit = _git(folder, "describe", "--always", "--abbrev=40", "--exclude=*")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)results")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changed else commit


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
