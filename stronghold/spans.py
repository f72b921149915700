"""One thing that one part of the machine did: what timelines are made of."""

from typing import NamedTuple


class Span(NamedTuple):
    """From ``begin_s`` to ``end_s``, seconds from the timeline's beginning, ``lane`` was at what ``name`` says."""

    lane: str
    name: str
    begin_s: float
    end_s: float
