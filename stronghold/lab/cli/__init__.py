"""The command line: arguments to settings, nothing else. Each command has a file of its own."""

import argparse
import os
import sys
from collections.abc import Sequence

from stronghold.errors import ParallelError, StrongholdError
from stronghold.lab.cli.console import print_error
from stronghold.lab.cli.finetune import add_finetune
from stronghold.lab.cli.parser import Help, Parser, left_to_the_first
from stronghold.lab.cli.partition import add_partition
from stronghold.lab.cli.plan import add_plan
from stronghold.lab.cli.plot import add_plot
from stronghold.lab.cli.probe import add_probe
from stronghold.lab.cli.report import add_report
from stronghold.lab.cli.trace import add_trace
from stronghold.lab.cli.train import _train_settings as _train_settings  # what arguments mean, without running it
from stronghold.lab.cli.train import add_train
from stronghold.lab.command import FAILED, INTERRUPTED, WRONG_USAGE, run_command

__all__ = ["FAILED", "INTERRUPTED", "WRONG_USAGE", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that ``arguments`` name (default: the process's own) and returns its exit code."""
    _forget_no_columns()
    return run_command(_parser(), arguments, _tell)


def _forget_no_columns() -> None:
    """Removes COLUMNS=0, by which a terminal tells that it does not know its width: rich prints nothing into it."""
    if (columns := os.environ.get("COLUMNS", "")).isdecimal() and int(columns) == 0:
        del os.environ["COLUMNS"]


def _tell(error: Exception, options: argparse.Namespace) -> int:
    if options.traceback:
        raise error
    return FAILED if _left_to_another(error) else print_error(error)


def _left_to_another(error: Exception) -> bool:
    """Whether another of the processes that torchrun started has this error to tell; waits until it has had time."""
    joined = getattr(sys.modules.get("stronghold.distributed.watch"), "joined", lambda: None)()
    if isinstance(error, ParallelError):
        if joined is not None and not error.ours:
            joined.linger()
        return not error.ours
    if joined is not None:
        return not joined.is_ours()
    return isinstance(error, ValueError | StrongholdError) and left_to_the_first()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="stronghold",
        description="Trains models that are larger than the device: a window of layers on it, the rest in RAM.",
        formatter_class=Help,
    )
    parser.add_argument("--traceback", action="store_true", help="show where in the program an error arose")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (add_train, add_finetune, add_plan, add_probe, add_plot, add_report, add_trace, add_partition):
        add(commands)
    return parser
