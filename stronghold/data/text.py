"""Documents from text and JSONL files, or from the Python standard library's own source."""

import glob
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Test suites are no source that anybody reads.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def find_files(source: str | Path) -> list[Path]:
    """Returns the files that ``source`` names, sorted by path: a file, all below a directory, or a glob's.

    Of a directory, files and folders whose name begins with a dot are left out. Raises ValueError where
    there is none.
    """
    path = Path(source)
    if path.is_dir():
        files = [
            file
            for file in path.rglob("*")
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
        rule = "a data directory must hold at least one file"
    elif path.exists():
        return [path]
    else:
        files = [Path(name) for name in glob.glob(str(source), recursive=True) if Path(name).is_file()]
        rule = "data must be an existing file, a directory or a glob that matches at least one file"
    if not files:
        raise ValueError(f"{rule} (got {str(source)!r}, which gives none); pass another path")
    return sorted(files)


def read_documents(source: str | Path) -> Iterator[str]:
    """Yields the documents of ``source``, in order: each text file is one, of JSONL each line's "text".

    Empty documents are left out. Raises ValueError, naming the file and where it can the line, for what
    cannot be read.
    """
    for file in find_files(source):
        if file.suffix == ".jsonl":
            yield from _read_jsonl(file)
        elif text := _decode(file, _read_bytes(file)):
            yield text


def standard_library() -> Iterator[str]:
    """Yields the source files of the running Python's standard library, sorted by path, without its tests."""
    files: list[Path] = []
    for folder, inside, names in os.walk(sysconfig.get_path("stdlib")):
        inside[:] = set(inside) - _SKIPPED_FOLDERS  # not gone into: what is installed there may be many times as much
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    for file in sorted(files):
        # Source is UTF-8 but for a handful of files about encodings.
        if text := file.read_bytes().decode("utf-8", errors="replace"):
            yield text


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(
            f"a data file must be readable (got {error.strerror} for {str(file)!r}); "
            "check its permissions, or pass another path"
        ) from error


def _decode(file: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"a data file must be UTF-8 text (got byte 0x{content[error.start]:02x} at offset {error.start} "
            f"of {str(file)!r}); convert it, or leave it out with a glob such as 'folder/**/*.txt'"
        ) from error


def _read_jsonl(file: Path) -> Iterator[str]:
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip() and (text := _text_of(line, f"{file}:{number}")):
                    yield text
    except OSError as error:
        _read_bytes(file)  # raises the same error with its message
        raise ValueError(f"a data file must be readable (got {error} for {str(file)!r})") from error


def _text_of(line: bytes, where: str) -> str:
    rule = 'each line of a .jsonl file must be a JSON object with a text under "text"'
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{rule} (at {where}: not JSON: {error}); mend or remove that line") from error
    if not isinstance(record, dict):
        raise ValueError(f"{rule} (at {where}: got a {type(record).__name__}); mend or remove that line")
    if not isinstance(text := record.get("text"), str):
        fields = ", ".join(map(repr, list(record)[:8])) or "none"
        problem = f'"text" is a {type(text).__name__}' if "text" in record else f"its fields are: {fields}"
        raise ValueError(f"{rule} (at {where}: {problem}); rename the field, or mend or remove that line")
    return text
