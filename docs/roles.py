"""Docstrings name objects by reStructuredText's roles; on pages these are code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Roles(griffe.Extension):
    """Turns :func:`name`, :meth:`name`, :class:`name` and :mod:`name` into `name`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", obj.docstring.value)
