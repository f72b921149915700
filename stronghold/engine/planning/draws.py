"""Numbers that a model draws by Python's generator, or by NumPy's, while it is run without values."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

LARGEST = 1 - 2.0**-53
"""The number nearest to 1 that a uniform draw of [0, 1) gives."""

_OWNERS = ((random, ("random", "uniform")), (np.random, ("random", "random_sample", "rand", "uniform")))
_entered: Counter[int] = Counter()
"""How often each thread runs a model without values: others draw as always."""


@contextmanager
def no_layer_dropped() -> Iterator[None]:
    """Has this thread draw the largest number wherever it draws one of an interval, and no generator change by it.

    ``random.random() < layerdrop`` leaves out no layer then. transformers draws so in speech and music models; what
    else a model draws, such as the spans that it masks, is drawn, and both generators are put back at the end.
    """
    thread, of_python, of_numpy = threading.get_ident(), random.getstate(), np.random.get_state()
    replaced = [(owner, name, getattr(owner, name)) for owner, names in _OWNERS for name in names]
    for owner, name, draw in replaced:
        setattr(owner, name, _largest(draw, bounded=name == "uniform"))
    _entered[thread] += 1
    try:
        yield
    finally:
        _entered[thread] -= 1
        for owner, name, draw in replaced:
            setattr(owner, name, draw)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _largest(draw: Callable[..., Any], *, bounded: bool) -> Callable[..., Any]:
    """Returns ``draw``, but for a single number in a thread that runs a model without values: that is the largest."""

    def drawn(*args: Any, **kwargs: Any) -> Any:
        found = draw(*args, **kwargs)
        if not isinstance(found, float) or not _entered[threading.get_ident()]:
            return found
        return _scaled(*args, **kwargs) if bounded else LARGEST

    return drawn


def _scaled(low: float = 0.0, high: float = 1.0, *_: Any, **ends: float) -> float:
    """Returns the largest of ``uniform(low, high)``; Python calls the two ``a`` and ``b``."""
    low, high = ends.get("a", low), ends.get("b", high)
    return low + (high - low) * LARGEST
