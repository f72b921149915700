"""Numbers that a model draws by Python's generator, or by NumPy's, while it is run without values."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from stronghold.engine.process_generators import process_states, put_back
from stronghold.engine.replaced_functions import ReplacedFunctions

LARGEST = 1 - 2.0**-53
"""The number nearest to 1 that a uniform draw of [0, 1) gives."""
MOST = 1000
"""So often it is drawn: a loop that waits for another number ends."""

_left: dict[int, list[int]] = {}
"""How often each thread that runs a model without values still draws the largest number."""


@contextmanager
def no_layer_dropped() -> Iterator[None]:
    """Has this thread draw the largest number wherever it draws one of an interval, and no generator change by it.

    ``random.random() < layerdrop`` leaves out no layer then. transformers draws so in speech and music models; what
    else a model draws, such as the spans that it masks, is drawn, and both generators are put back at the end. What was
    imported by its own name, or is of a generator of the model's own, draws as always.
    """
    thread, states = threading.get_ident(), process_states()
    with _largest():
        _left.setdefault(thread, []).append(MOST)
        try:
            yield
        finally:
            _left[thread].pop()
            if not _left[thread]:
                del _left[thread]
            put_back(states)


def _drawing(name: str, draw: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``draw``, but for a single number in a thread that runs a model without values: that is the largest."""

    def drawn(*args: Any, **kwargs: Any) -> Any:
        found, left = draw(*args, **kwargs), _left.get(threading.get_ident())
        if left is None or not left[-1] or not isinstance(found, float):
            return found
        left[-1] -= 1
        return _scaled(*args, **kwargs) if name == "uniform" else LARGEST

    return drawn


def _scaled(low: float = 0.0, high: float = 1.0, *_: Any, **ends: float) -> float:
    """Returns the largest of ``uniform(low, high)``; Python calls the two ``a`` and ``b``."""
    low, high = ends.get("a", low), ends.get("b", high)
    return low + (high - low) * LARGEST


_largest = ReplacedFunctions(
    [
        *((random, name) for name in ("random", "uniform")),
        *((np.random, name) for name in ("random", "random_sample", "sample", "ranf", "rand", "uniform")),
    ],
    _drawing,
)
