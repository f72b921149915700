"""What all commands' parsers share: errors in one line, and help that keeps its examples as they are."""

import argparse
from typing import Any, NoReturn

from stronghold.command import WRONG_USAGE


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line with the way to its help."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_USAGE, f"stronghold: error: {message}; see {self.prog} --help\n")


class Help(argparse.RawDescriptionHelpFormatter):
    """Help with room for the longest option beside what it does."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)


Commands = Any
"""What add_subparsers returns, which argparse gives no public name: a command adds itself to it."""
