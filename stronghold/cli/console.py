"""How a command ends, and what it says: exit codes, notes, and errors in one line."""

import sys
from collections.abc import Iterable

from stronghold.errors import LostProcessError, StrongholdError

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130


def print_notes(notes: Iterable[str]) -> None:
    """Prints each note as a line, to the standard error output."""
    for note in notes:
        print(f"stronghold: note: {note}", file=sys.stderr)


def print_error(error: Exception) -> int:
    """Prints an error as one line and returns the exit code that it has."""
    print(f"stronghold: error: {_in_one_line(error)}", file=sys.stderr)
    wrong = isinstance(error, ValueError | StrongholdError) and not _is_failure(error)
    return WRONG_USAGE if wrong else FAILED


def _is_failure(error: Exception) -> bool:
    """Tells errors of a training under way from those of its settings."""
    from stronghold.training import TrainingError

    return isinstance(error, TrainingError | LostProcessError)


def _in_one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.strerror}: {error.filename}"
    else:
        text = str(error) or type(error).__name__
    text = " ".join(text.split())
    return text if isinstance(error, ValueError | StrongholdError | OSError) else f"{type(error).__name__}: {text}"
