"""Where paths lead: a run that goes on may name the files that it began with in another way, or from elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any


def real_paths(settings: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Returns where those of the ``settings`` lead that have one of the ``names`` and are paths."""
    return {name: os.path.realpath(path) for name in names if isinstance(path := settings.get(name), str)}


def as_named(
    now: Mapping[str, Any], before: Mapping[str, Any], places: Mapping[str, str], names: Iterable[str]
) -> dict[str, Any]:
    """Returns the settings ``before``, with the paths that lead where those of ``now`` do as these are written.

    ``places`` is what :func:`real_paths` returned for ``before`` then; what it lacks is taken to lead from here.
    """
    here, there = real_paths(now, names), real_paths(before, names) | dict(places)
    return {**before, **{name: now[name] for name in here if name in before and here[name] == there.get(name)}}
