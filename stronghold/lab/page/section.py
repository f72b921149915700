"""What a page is made of."""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page: ``body`` is HTML, in which all that comes from records is escaped."""

    title: str
    body: str

    @property
    def anchor(self) -> str:
        """The name by which a link finds it."""
        return "-".join(self.title.lower().split())


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A picture, drawn elsewhere: a whole SVG file's text, and what it shows in words."""

    title: str
    svg: str
    caption: str


def figures_section(title: str, figures: Iterable[Figure]) -> Section:
    """Returns ``figures`` as a section.

    Each is an image of its own: names inside of one SVG do not meet those of another, and nothing in it is run.
    """
    return Section(title=title, body="".join(map(_figure, figures)))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table that scrolls by itself where it is wider than the page. Cells are HTML, as are heads."""
    columns = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    lines = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>' for first, *rest in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{columns}</tr></thead><tbody>{lines}</tbody></table></div>'
    )


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Returns (colour, label) as a list; labels are escaped here."""
    items = "".join(f"<li>{swatch(colour)}{escape(label)}</li>" for colour, label in entries)
    return f'<ul class="legend">{items}</ul>'


def swatch(colour: str) -> str:
    """Returns a spot of a colour."""
    return f'<span class="swatch" style="background:{colour}"></span>'


def _figure(figure: Figure) -> str:
    source = base64.b64encode(figure.svg.encode()).decode()
    return (
        f'<figure><h3>{escape(figure.title)}</h3><div class="scroll" tabindex="0">'
        f'<img class="paper" src="data:image/svg+xml;base64,{source}" alt="{escape(figure.title)}"></div>'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
    )
