"""What transformers' hooks record inside of a layer (attentions, routers' logits), once for each micro-batch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Recorded:
    """Keeps what is recorded in each micro-batch apart, and records for all what it is put together to.

    Without it ``output_attentions=True`` would give as many entries a layer as there are micro-batches.
    """

    def __init__(self) -> None:
        capturing = sys.modules.get("transformers.utils.output_capturing")  # not imported, it records nothing
        self._current: Any = getattr(capturing, "_active_collector", None)
        whole = None if self._current is None else self._current.get()
        self._whole: dict[str, Any] = {} if whole is None else whole
        self.pieces: list[dict[str, list[Any]]] = []
        """What each micro-batch has added, by the name of what is recorded."""

    @contextmanager
    def piece(self) -> Iterator[None]:
        """Runs a micro-batch."""
        if not self._whole:
            self.pieces.append({})
            yield
            return
        # Copies, for how long a list is tells transformers which layer it has come to.
        apart = {name: value.copy() if isinstance(value, list) else value for name, value in self._whole.items()}
        before = self._current.set(apart)
        try:
            yield
        finally:
            self._current.reset(before)
        lists = {name: value for name, value in self._whole.items() if isinstance(value, list)}
        self.pieces.append({name: apart[name][len(value) :] for name, value in lists.items()})

    def add(self, joined: dict[str, list[Any]]) -> None:
        """Records what the pieces are put together to."""
        for name, values in joined.items():
            self._whole[name].extend(values)
