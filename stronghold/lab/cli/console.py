"""What commands say beside their output: notes and errors."""

import sys
from collections.abc import Iterable

from stronghold.errors import LostProcessError, StrongholdError
from stronghold.lab.command import ERROR, FAILED, WRONG_USAGE, in_one_line


def print_notes(notes: Iterable[str]) -> None:
    """Prints each note as a line, to the standard error output."""
    for note in notes:
        print(f"stronghold: note: {note}", file=sys.stderr)


def print_error(error: Exception) -> int:
    """Prints an error as one line and returns the exit code that it has."""
    print(f"{ERROR}{in_one_line(error)}", file=sys.stderr)
    wrong = isinstance(error, ValueError | StrongholdError) and not _is_failure(error)
    return WRONG_USAGE if wrong else FAILED


def _is_failure(error: Exception) -> bool:
    """Tells errors of a training under way from those of its settings."""
    from stronghold.lab.training import TrainingError

    return isinstance(error, TrainingError | LostProcessError)
