"""Outputs: what a command is to write is tried before it computes, and nothing of that stays."""

from __future__ import annotations

import fnmatch
import glob
import io
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from stronghold.formats.mounts import check_no_mount
from stronghold.formats.whole_file import write_whole

if TYPE_CHECKING:
    from rich.console import Console

PathLike = str | os.PathLike[str]

LOG_NAME, TIMELINE_NAME = "log.jsonl", "timeline.json"
"""What a run writes into its folder."""
RUNS_NAME, TRIALS_NAME, TEXTS = "runs.jsonl", "trials.jsonl", "log_*.txt"
"""What a folder of results has beside the runs' folders: records of runs, of trials, and logs of the artifact."""

_IN_FOLDERS = {"out": [LOG_NAME, TIMELINE_NAME], "save": ["config.json"], "store": []}
"""Files that a run writes into its folders, by their settings' names; its other outputs are files themselves."""

PICTURES = (".png", ".svg", ".pdf")
"""What a picture of runs is called, by its kind."""
_IMAGES = (".gif", ".jpeg", ".jpg", ".pdf", ".png", ".svg", ".webp")


def plain_console(**options: Any) -> Console:
    """Returns a console of rich's that prints text as it is: brackets in a path are no markup, ":x:" no emoji."""
    from rich.console import Console

    return Console(markup=False, emoji=False, **options)


def own_files(out: str) -> list[tuple[str, str]]:
    """Returns what a run writes into its folder by itself, with what to call each."""
    return [("the run's log", os.path.join(out, LOG_NAME)), ("the run's timeline", os.path.join(out, TIMELINE_NAME))]


def files_of(run: str) -> list[str]:
    """Returns the files of a run, of which ``run`` is the folder or its log, or of all runs below a folder."""
    names = "**/" + LOG_NAME, "**/" + TIMELINE_NAME
    return [os.path.join(glob.escape(run), name) for name in names] if os.path.isdir(run) else [run]


def files_of_results(folder: str) -> list[str]:
    """Returns the files that a page of the results in ``folder`` is made of."""
    return [*files_of(folder), *(os.path.join(glob.escape(folder), name) for name in (RUNS_NAME, TRIALS_NAME, TEXTS))]


def check_file(name: str, path: PathLike) -> None:
    """Raises ValueError, which calls it ``name``, unless a file at ``path`` can be written, or made with its folders.

    What is there keeps its content; a pipe or a device is not opened.
    """
    text = os.fspath(path)
    if not text or text.endswith(os.sep):
        _refuse(name, "a file", text, "no file's name")
    try:
        try:
            mode = os.stat(text).st_mode
        except FileNotFoundError:
            _try_in_nearest(os.path.dirname(os.path.realpath(text)))
        else:
            if stat.S_ISDIR(mode):
                _refuse(name, "a file", text, "a directory")
            if stat.S_ISREG(mode):
                os.close(os.open(text, os.O_WRONLY | os.O_APPEND))
    except OSError as error:
        _refuse(name, "a file", text, error.strerror or str(error))


def check_page(name: str, path: PathLike) -> None:
    """Raises ValueError as :func:`check_file` does, and for a name that says of a page that it is an image."""
    check_file(name, path)
    stem, suffix = os.path.splitext(os.fspath(path))
    if suffix.lower() in _IMAGES:
        raise ValueError(f"{name} is a page in HTML (got {os.fspath(path)!r}); name it {stem + '.html'!r}")


def check_picture(name: str, path: PathLike) -> None:
    """Raises ValueError as :func:`check_file` does, and for a name that does not end in one of ``PICTURES``."""
    check_file(name, path)
    stem, suffix = os.path.splitext(os.fspath(path))
    if suffix.lower() not in PICTURES:
        raise ValueError(f"{name} is a picture in PNG, SVG or PDF (got {os.fspath(path)!r}); name it {stem + '.png'!r}")


def check_folder(name: str, path: PathLike) -> None:
    """Raises ValueError, which calls it ``name``, unless ``path`` can be made with its parents, or written into."""
    text = os.fspath(path)
    if not text:
        _refuse(name, "a folder", text, "no folder's name")
    try:
        _try_in_nearest(os.path.realpath(text))
    except OSError as error:
        _refuse(name, "a folder", text, error.strerror or str(error))


def check_places(*, folders: Iterable[tuple[str, PathLike]], files: Iterable[tuple[str, PathLike | None]]) -> None:
    """Raises ValueError, as above, unless all ``folders``, and the ``files`` that there are, can be written."""
    for name, folder in folders:
        check_folder(name, folder)
    for name, file in files:
        if file is not None:
            check_file(name, file)


def check_save(
    save: PathLike, *, folders: Iterable[tuple[str, PathLike]], files: Iterable[tuple[str, PathLike | None]]
) -> None:
    """Raises ValueError unless a model can be saved in ``save``, apart from the run's other ``folders`` and ``files``.

    Those are there from the beginning, each by its setting's name, and the model's folder appears as a whole in the
    end: it may be in one of the folders, but it can hold none of them, nor a file, nor be a mount point.
    """
    check_folder("save", save)
    check_no_mount(save)
    own = os.path.realpath(save)
    check_folder("save's parent", os.path.dirname(own))  # it is written beside its name
    for name, path, is_file in [*((*one, False) for one in folders), *((*one, True) for one in files)]:
        if path is None:
            continue
        other = os.path.realpath(path)
        shared = os.path.commonpath([own, other])
        if shared == own or (shared == other and is_file):
            where = "the same" if own == other else "in it" if shared == own else "a file above it"
            raise ValueError(
                f"save must be a folder that holds none of the run's other outputs (got save={os.fspath(save)!r} and "
                f"{name}={os.fspath(path)!r}, which is {where}); pass another path for one of them"
            )


def check_apart(
    outputs: Iterable[tuple[str, PathLike | None]],
    *,
    kept: Iterable[tuple[str, PathLike]] = (),
    folders: Iterable[tuple[str, PathLike]] = (),
    inputs: Iterable[tuple[str, PathLike | None]] = (),
) -> None:
    """Raises ValueError unless each of the ``outputs`` has a place of its own, each by its setting's name.

    That is no other output's, neither one of ``kept``, which the run writes by itself, nor above or below one, nor one
    of the ``folders`` or above one, nor a file that is there of the ``inputs``, which may be files, folders and
    patterns: what is there would be lost. A pipe or a device is nobody's own.
    """
    given = [(name, path, os.path.realpath(path)) for name, path in outputs if path is not None]
    given = [one for one in given if not os.path.exists(one[2]) or os.path.isfile(one[2]) or os.path.isdir(one[2])]
    known = [(name, path) for name, path in inputs if path is not None]
    for number, (name, path, own) in enumerate(given):
        for other_name, other, place in given[:number]:
            if own == place:
                _refuse_shared(name, path, other_name, other, "another output")
        for other_name, other in kept:
            place = os.path.realpath(other)
            if os.path.commonpath([own, place]) in (own, place):
                _refuse_shared(name, path, other_name, other, "of the run's own")
        for other_name, other in folders:
            if os.path.commonpath([own, os.path.realpath(other)]) == own:
                _refuse_shared(name, path, other_name, other, "a folder of the run's")
        for other_name, other in known:
            if os.path.isfile(own) and _holds(other, own):
                _refuse_shared(name, path, other_name, other, "read, and would be lost")


def check_sources(
    outputs: Iterable[tuple[str, PathLike | None]],
    save: PathLike,
    *,
    model: PathLike | None,
    data: Iterable[tuple[str, PathLike | None]],
) -> None:
    """Raises ValueError for outputs that would be read as ``data``, and a model saved over the ``model`` that it was.

    Of data's folders all is read but what is called ``.name``, and of a pattern what it matches: a run that goes on
    would be refused as one on other data. ``model`` is a folder, or the config.json in it.
    """
    known = [(name, path) for name, path in data if path is not None]
    folders = [(name, path, os.path.realpath(path)) for name, path in known if os.path.isdir(path)]
    patterns = [(name, path) for name, path in known if not os.path.exists(path)]
    given = [(name, path) for name, path in outputs if path is not None]
    for name, path in given:
        for other_name, other, place in folders:
            within = os.path.relpath(os.path.realpath(path), place).split(os.sep)
            if within == [os.curdir] or not any(part.startswith(".") for part in within):
                raise ValueError(
                    f"{name} must not be in a folder that is read as data (got {name}={os.fspath(path)!r} and "
                    f"{other_name}={os.fspath(other)!r}: a run that goes on would read its own files); pass another "
                    "path, or data by a pattern"
                )
        written = [os.path.join(path, one) for one in _IN_FOLDERS[name]] if name in _IN_FOLDERS else [os.fspath(path)]
        for other_name, pattern in patterns:
            for file in written:
                if _matches(_parts(pattern), _parts(file)):
                    raise ValueError(
                        f"{name} must have no file that is read as data (got {name}={os.fspath(path)!r}, and "
                        f"{other_name}={os.fspath(pattern)!r} matches {file!r}: a run that goes on would read its own "
                        "files); pass another path, or a pattern that leaves it out"
                    )
    if model is None:
        return
    folder = model if os.path.isdir(model) else os.path.dirname(os.path.abspath(model))
    if os.path.realpath(save) == os.path.realpath(folder):
        raise ValueError(
            f"save must be another folder than that of the model to train (got save={os.fspath(save)!r} and "
            f"model={os.fspath(model)!r}, which would be lost); pass another path"
        )


def _holds(known: PathLike, file: str) -> bool:
    """Whether ``file`` is what is ``known``, or one of a folder or a pattern."""
    if os.path.isdir(known):
        place = os.path.realpath(known)
        return os.path.commonpath([place, file]) == place
    found = [known] if os.path.exists(known) else glob.iglob(os.fspath(known), recursive=True)
    return any(os.path.samefile(one, file) for one in found)


def _parts(path: PathLike) -> list[str]:
    return os.path.abspath(path).split(os.sep)


def _matches(pattern: Sequence[str], names: Sequence[str]) -> bool:
    """Whether glob would find the path of ``names``, there or not, by ``pattern``, whose ``**`` is any folders."""
    if not pattern or not names:
        return not names and all(part == "**" for part in pattern)
    first, name = pattern[0], names[0]
    found = (first.startswith(".") or not name.startswith(".")) and fnmatch.fnmatchcase(name, first)
    if first == "**":
        return _matches(pattern[1:], names) or (found and _matches(pattern, names[1:]))
    return found and _matches(pattern[1:], names[1:])


def write_output(what: str, path: PathLike, content: str | bytes) -> None:
    """Writes a file, with its folders, which has all of ``content`` or is as before.

    Raises OSError with its name, and ``what`` could not be written.
    """
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        raise OSError(error.errno, f"cannot write the {what} ({error.strerror})", os.fspath(path)) from error


def write_figure(figure: Any, path: PathLike, kind: str, **options: Any) -> None:
    """Writes a matplotlib figure as a picture of that ``kind``, as :func:`write_output` does. Raises OSError."""
    picture = io.BytesIO()
    figure.savefig(picture, format=kind, **options)
    write_output("figure", path, picture.getvalue())


def checkpoints_over(
    folder: str, pattern: str, outputs: Iterable[tuple[str, PathLike | None]]
) -> list[tuple[str, PathLike]]:
    """Returns the places of checkpoints in ``folder``, named by ``pattern``, that outputs are at or below."""
    place = os.path.realpath(folder)
    firsts = (os.path.relpath(os.path.realpath(p), place).split(os.sep)[0] for _, p in outputs if p is not None)
    return [("the run's checkpoint", os.path.join(folder, one)) for one in firsts if re.fullmatch(pattern, one)]


def _refuse_shared(name: str, path: PathLike, other_name: str, other: PathLike, what: str) -> NoReturn:
    raise ValueError(
        f"{name} must have a place of its own (got {name}={os.fspath(path)!r} and {other_name}={os.fspath(other)!r}, "
        f"which is {what}); pass another path"
    )


def _try_in_nearest(folder: str) -> None:
    """Makes a file without a name in ``folder``, or in the nearest one above it that is there."""
    while True:
        try:
            os.stat(folder)
        except FileNotFoundError:
            folder = os.path.dirname(folder)
        else:
            break
    tempfile.TemporaryFile(dir=folder).close()


def _refuse(name: str, kind: str, path: str, reason: str) -> NoReturn:
    raise ValueError(
        f"{name} must be {kind} that can be written (got {path!r}: {reason}); pass another path, or change what may be "
        "written there"
    )
