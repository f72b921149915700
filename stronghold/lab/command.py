"""How a command ends, whichever it is: its exit code, and its errors in one line."""

import argparse
import atexit
import errno
import gc
import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence

from stronghold.errors import StrongholdError

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130
"""As shells have it for SIGINT; for SIGTERM, too."""
ERROR = "stronghold: error: "
"""What begins the line in which a command tells its error. A library may say more behind it, while the process ends."""


def run_command(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    tell: Callable[[Exception, argparse.Namespace], int],
) -> int:
    """Calls the ``run`` of the parsed ``arguments`` (default: the process's own) with them; returns the exit code.

    ``tell`` hears of an error, with the same, and returns its code. An interrupt, and a reader of the output who has
    gone, are none. What ``run`` gets has the ``arguments`` themselves, too.
    """
    _open_missing()
    _escape_what_cannot_be_written()
    atexit.register(_leave_garbage)
    options = parser.parse_args(arguments)
    options.arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = int(options.run(options))
        sys.stdout.flush()  # now, while a reader who has gone can still be noticed
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # there is nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        return tell(error, options)


def error_in(lines: Iterable[str]) -> str:
    """Returns the last error that a command has told in ``lines``, its output; nothing if it has told none."""
    told = [line for line in lines if line.startswith(ERROR)]
    return told[-1].removeprefix(ERROR).strip() if told else ""


def _leave_garbage() -> None:
    """Has the interpreter, as it ends, search nothing that is left for garbage, which takes most of a second.

    Where Triton is loaded the interpreter does search: nanobind, by which Triton 3.9 binds its classes to Python, tells
    of those that were not collected, in thirty lines.
    """
    if "triton" not in sys.modules:
        gc.freeze()


def _open_missing() -> None:
    """Opens those of the standard streams that the process was started without, to nowhere.

    Else the first files that it opens have their numbers, and libraries would print into them.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (until the process ends)


def _escape_what_cannot_be_written() -> None:
    """Has the standard output write what its encoding lacks as Python's standard error output does, by its number.

    Else a run that trained for hours would end in an error over a "µ" of its summary where the locale has ASCII alone,
    or over a path's other bytes where it has UTF-8.
    """
    output = sys.stdout
    if isinstance(output, io.TextIOWrapper) and (output.errors == "strict" or output.encoding.lower() != "utf-8"):
        output.reconfigure(errors="backslashreplace")


def in_one_line(error: Exception) -> str:
    """Returns what an error says, with its kind where it is not one that says all by itself."""
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.strerror}: {error.filename}"
    else:
        text = str(error)
    text, kind = " ".join(text.split()), type(error).__name__
    if isinstance(error, OSError) and ";" not in text and error.errno in _REMEDIES:
        text += "; " + _REMEDIES[error.errno]
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] != "stronghold":
        return missing(error)
    if not text:
        return kind
    return text if isinstance(error, ValueError | StrongholdError | OSError) else f"{kind}: {text}"


def missing(error: ModuleNotFoundError) -> str:
    """Returns what an error says of a package that is not installed, with the way to install it."""
    package = (error.name or "").partition(".")[0]
    extra = next((extra for extra, packages in _EXTRAS.items() if package in packages), "lab")
    return f"this needs {package or error}, which is not installed; pip install '.[{extra}]' in the project's root"


_RIGHTS = "grant this user the rights to it and to the folders above it, or pass another path"
_SPACE = "free space there, or pass a path on another disk"
_REMEDIES = {
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: "pass a path on a file system that can be written",
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or pass a path on another disk",
}
"""What is to be done about an error of the system's, wherever it arose, that does not say so itself."""
_EXTRAS = {
    "baselines": ("deepspeed", "ninja", "torchao"),
    "examples": ("sklearn",),
    "finetune": ("datasets", "peft", "pyarrow", "trl", "yaml"),
}
"""The extras of pyproject.toml that bring what a command may miss; the lab's bring the rest."""
