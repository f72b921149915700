"""Documents from text and JSONL files, or from the Python standard library's own source."""

import glob
import json
import os
import stat
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_LINES = {".jsonl", ".ndjson", ".json"}
"""What files of JSON lines are called."""
_TABLES = {".csv", ".tsv", ".parquet", ".arrow", ".feather", ".orc", ".avro", ".xls", ".xlsx"}
"""What files are called whose text would have to be taken out of columns."""
_CHATS = ("messages", "conversations", "conversation", "dialog", "prompt", "instruction")
"""Fields of records that are no text before a template has made them into one."""
_MEND = "mend or remove that line, write a list of records as one on each line, or leave the file out with a glob"
_TAKEN = 'data are UTF-8 text files, or JSON lines, each an object with a text under "text"'

# Test suites are no source that anybody reads.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def find_files(source: str | Path) -> list[Path]:
    """Returns the files that ``source`` names, sorted by path: a file, all below a directory, or a glob's.

    Of a directory, files and folders whose name begins with a dot are left out, and links to folders are followed.
    Raises ValueError where there is none, and where a directory has a part that cannot be looked at.
    """
    path = Path(source)
    try:
        if path.is_dir():
            files = list(_files_below(path))
            rule = "a data directory must hold at least one file"
        elif path.exists():
            return [path]
        else:
            files = [Path(name) for name in glob.glob(str(source), recursive=True) if Path(name).is_file()]
            rule = "data must be an existing file, a directory or a glob that matches at least one file"
    except OSError as error:
        raise ValueError(
            f"data must be readable (got {error.strerror} for {os.fspath(error.filename or path)!r}); grant this user "
            "the rights to it and to the folders above it, or leave it out with a glob such as 'folder/**/*.txt'"
        ) from error
    if not files:
        raise ValueError(f"{rule} (got {str(source)!r}, which gives none); pass another path")
    return sorted(files)


def _files_below(top: Path) -> Iterator[Path]:
    """Yields the files of a directory and of those in it; of one that links lead to as well, once.

    ``Path.rglob`` says nothing of what it may not look at, and goes into no link: a run would learn a part of its data.
    Raises OSError.
    """
    seen = set[tuple[int, int]]()
    folders, links = [top], list[Path]()  # links last, so that a file has the path that it has without them
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        found = folder.stat()
        if (found.st_dev, found.st_ino) in seen:
            continue
        seen.add((found.st_dev, found.st_ino))
        for path in sorted(folder.iterdir()):
            if path.name.startswith("."):
                continue
            if stat.S_ISDIR(path.stat().st_mode):  # of a link to nothing too this is an error
                (links if path.is_symlink() else folders).append(path)
            elif path.is_file():
                yield path


def read_documents(source: str | Path) -> Iterator[str]:
    """Yields the documents of ``source``, in order: each text file is one, of JSONL each line's "text".

    Empty documents are left out. Raises ValueError, naming the file and where it can the line, for what
    cannot be read, and for what is neither: JSON of another shape, tables, binary files.
    """
    files = find_files(source)
    for file in files:
        if file.suffix.lower() in _TABLES:
            raise ValueError(
                f"{_TAKEN} (got a table, {str(file)!r}); write the column with the text as JSON lines, or leave the "
                "file out with a glob such as 'folder/**/*.txt'"
            )
    for file in files:
        if file.suffix.lower() in _LINES:
            yield from _read_jsonl(file)
        elif text := _decode(file, _read_bytes(file)):
            if found := _as_json(text):
                raise ValueError(
                    f"{_TAKEN} (got {found} in {str(file)!r}); call a file of JSON lines .jsonl, or make others into "
                    "such lines"
                )
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
    wrong = content.find(0)  # valid UTF-8, but of no text: a binary file, or UTF-16
    if wrong < 0:
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            wrong = error.start
    raise ValueError(
        f"a data file must be UTF-8 text (got byte 0x{content[wrong]:02x} at offset {wrong} "
        f"of {str(file)!r}); convert it, or leave it out with a glob such as 'folder/**/*.txt'"
    )


def _as_json(text: str) -> str:
    """Returns what JSON ``text`` is, or begins with in its first line, if it is any that holds records."""
    if text.lstrip()[:1] not in ("{", "["):
        return ""
    for part, what in ((text, "JSON"), (text.lstrip().partition("\n")[0], "JSON lines")):
        try:
            record = json.loads(part)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) or (isinstance(record, list) and record and isinstance(record[0], dict)):
            return what
    return ""


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
    rule = 'each line of a file of JSON lines must be an object with a text under "text"'
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{rule} (at {where}: not JSON: {error}); {_MEND}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{rule} (at {where}: got a {type(record).__name__}); {_MEND}")
    if not isinstance(text := record.get("text"), str):
        fields = ", ".join(map(repr, list(record)[:8])) or "none"
        problem = f'"text" is a {type(text).__name__}' if "text" in record else f"its fields are: {fields}"
        chat = next((field for field in _CHATS if field in record), None)
        remedy = "rename the field, or mend or remove that line"
        if chat is not None:
            remedy = f"write its {chat!r} as one text, such as a tokenizer's apply_chat_template(..., tokenize=False)"
        raise ValueError(f"{rule} (at {where}: {problem}); {remedy}")
    return text
