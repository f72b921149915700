"""What is shown to people: rows of (section, name, value), as text, as a table and in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


class Shown(ABC):
    """Rows of (section, name, value), as text, as a table of rich's and in a notebook."""

    title = "report"

    @abstractmethod
    def rows(self) -> list[tuple[str, str, str]]:
        """Returns the table's lines: (section, name, value)."""

    def __str__(self) -> str:
        return _in_lines(self.rows())

    def __rich__(self) -> Table:
        return table(self.title, self.rows())

    def _repr_html_(self) -> str:
        return _in_html(self.rows())


def table(title: str, rows: list[tuple[str, str, str]]) -> Table:
    """Returns rows of (section, name, value) as a table, with a line above each section."""
    from rich.table import Table

    drawn = Table(title=title, show_header=False, title_justify="left")
    drawn.add_column("section", style="bold", no_wrap=True)
    drawn.add_column("name", no_wrap=True)
    drawn.add_column("value")
    for index, (section, name, value) in enumerate(rows):
        drawn.add_row(section, name, value, end_section=index + 1 < len(rows) and bool(rows[index + 1][0]))
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
    section_width = max(len(section) for section, _, _ in rows)
    name_width = max(len(name) for _, name, _ in rows)
    return "\n".join(f"{section:<{section_width}}  {name:<{name_width}}  {value}" for section, name, value in rows)
