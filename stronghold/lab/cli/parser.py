"""What all commands' parsers share: errors in one line, and help that keeps its examples as they are."""

import argparse
import os
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from stronghold.lab.command import ERROR, WRONG_USAGE


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line with the way to its help."""

    def parse_known_args(  # type: ignore[override]  # one of its overloads, which all end here
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parses ``args``; what no argument takes is an error here: of a command, whose parser is told of it first."""
        found, others = super().parse_known_args(args, namespace)
        if others:
            self.error(f"unrecognized arguments: {' '.join(others)}")
        return found, others

    def error(self, message: str) -> NoReturn:
        told = left_to_the_first()
        self.exit(WRONG_USAGE, None if told else f"{ERROR}{message}; see {self.prog} --help\n")


def left_to_the_first() -> bool:
    """Whether the first of the processes that torchrun started tells what is wrong; waits until it has had time.

    That is for before they have joined: each finds the same in the same arguments.
    """
    left = os.environ.get("RANK", "0") != "0"
    if left:
        time.sleep(20)  # torchrun ends all when the first one does: that one may still be on its way to the same error
    return left


class Help(argparse.RawDescriptionHelpFormatter):
    """Help with room for the longest option beside what it does."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)


Commands = Any
"""What add_subparsers returns, which argparse gives no public name: a command adds itself to it."""
