"""What is shown to people: rows of (section, name, value), as text, as a table and in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table

_BORDERS, _LEAST_VALUE = 10, 16
"""Characters of a line: what rich puts around three columns, and what a value keeps before the names are folded."""


class Shown(ABC):
    """Rows of (section, name, value), as text, as a table of rich's and in a notebook."""

    title = "report"

    @abstractmethod
    def rows(self) -> list[tuple[str, str, str]]:
        """Returns the table's lines: (section, name, value)."""

    def __str__(self) -> str:
        return _in_lines(self.rows())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        yield table(self.title, self.rows(), options.max_width)

    def _repr_html_(self) -> str:
        return _in_html(self.rows())


def table(title: str, rows: list[tuple[str, str, str]], width: int) -> Table:
    """Returns rows of (section, name, value) as a table in ``width`` characters, with a line above each section.

    Nothing is cut off: values are folded, and where next to nothing is left to them, sections and names as well. Nor is
    anything read as markup, as brackets in a path might be.
    """
    from rich.table import Table
    from rich.text import Text

    section_width, name_width = _widths(rows)
    whole = section_width + name_width + _BORDERS + _LEAST_VALUE <= width
    drawn = Table(title=title, show_header=False, title_justify="left")
    drawn.add_column("section", style="bold", no_wrap=whole, overflow="fold")
    drawn.add_column("name", no_wrap=whole, overflow="fold")
    drawn.add_column("value", overflow="fold")
    for index, row in enumerate(rows):
        drawn.add_row(*map(Text, row), end_section=index + 1 < len(rows) and bool(rows[index + 1][0]))
    return drawn


def _in_html(rows: list[tuple[str, str, str]]) -> str:
    """Returns rows of (section, name, value) as a table for a notebook, with a line above each section."""
    lines = []
    for section, name, value in rows:
        border = " style='border-top: 1px solid'" if section else ""
        cells = "".join(f"<td style='text-align: left'>{escape(cell)}</td>" for cell in (name, value))
        lines.append(f"<tr{border}><th style='text-align: left'>{escape(section)}</th>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _in_lines(rows: list[tuple[str, str, str]]) -> str:
    section_width, name_width = _widths(rows)
    return "\n".join(f"{section:<{section_width}}  {name:<{name_width}}  {value}" for section, name, value in rows)


def _widths(rows: list[tuple[str, str, str]]) -> tuple[int, int]:
    """Returns the characters of the longest section and of the longest name."""
    return max(len(section) for section, _, _ in rows), max(len(name) for _, name, _ in rows)
