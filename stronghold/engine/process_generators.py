"""Python's and NumPy's random numbers, which a whole process draws from one generator of each."""

from __future__ import annotations

import ctypes
import functools
import pickle
import random
import threading
from _random import Random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np

from stronghold.engine.replaced_functions import ReplacedFunctions


class ProcessStates(NamedTuple):
    """The states of both generators, and marks that no other states have."""

    marks: tuple[Any, ...]
    of_python: tuple[Any, ...]
    of_numpy: Any


_newest: ProcessStates | None = None


def process_states() -> ProcessStates:
    """Returns the states that both generators are in."""
    global _newest
    found, newest = process_marks(), _newest
    if newest is None or newest.marks != found:  # to make them takes some twenty times as long as to look at marks
        _newest = newest = ProcessStates(found, random.getstate(), np.random.get_state(legacy=False))
    return newest


@contextmanager
def drawing_from(states: ProcessStates) -> Iterator[None]:
    """Has what this thread draws in the block begin in these states, and what is drawn behind it go on as it was.

    Beside other threads of the user's the generators are put back when this one comes to draw, by a function of the
    module, and not before: one that loads batches meanwhile would draw its numbers twice.
    """
    thread = threading.get_ident()
    with ExitStack() as stack:

        def begin() -> None:
            stack.callback(put_back, process_states())
            put_back(states)

        if any(not one.name.startswith("stronghold-") for one in threading.enumerate() if one.ident != thread):
            stack.enter_context(_watched()())
            stack.callback(_begins.pop, thread, None)
            _begins[thread] = begin
        else:
            begin()
        yield


_begins: dict[int, Callable[[], None]] = {}
"""What a thread does before it draws for the first time."""


def _drawing(name: str, draw: Callable[..., Any]) -> Callable[..., Any]:
    def drawn(*args: Any, **kwargs: Any) -> Any:
        if (begin := _begins.pop(threading.get_ident(), None)) is not None:
            begin()
        return draw(*args, **kwargs)

    return drawn


def put_back(states: ProcessStates) -> None:
    """Has both generators draw what they would have drawn in these states."""
    if process_marks() != states.marks:
        random.setstate(states.of_python)
        np.random.set_state(states.of_numpy)


def process_marks() -> tuple[Any, ...]:
    """Returns what is another whenever one of the generators is in another state."""
    python, numpy = _generators()
    if not _memory_shows_draws():
        return python.getstate(), pickle.dumps(numpy.get_state(legacy=False))
    return _python_memory(python), _numpy_memory(numpy)


def _generators() -> tuple[random.Random, np.random.RandomState]:
    """Returns those of the process. NumPy makes its own when somebody asks for it, which takes milliseconds."""
    return random._inst, np.random.mtrand._rand  # type: ignore[attr-defined]


def _python_memory(generator: random.Random) -> tuple[Any, ...]:
    length = Random.__basicsize__ - object.__basicsize__
    stored = generator.gauss_next  # type: ignore[attr-defined]
    return _memory(id(generator) + object.__basicsize__, length), stored


def _numpy_memory(generator: np.random.RandomState) -> tuple[Any, ...]:
    bits: Any = generator._bit_generator  # type: ignore[attr-defined]
    if type(bits) is not np.random.MT19937:
        return (pickle.dumps(generator.get_state(legacy=False)),)
    length = type(generator).__basicsize__ - object.__basicsize__  # among it whether a normal number is in store
    return _memory(id(generator) + object.__basicsize__, length), _memory(bits.ctypes.state_address, 4 * 625)


def _memory(address: int, length: int) -> bytes:
    return (ctypes.c_char * length).from_address(address).raw


@functools.cache
def _memory_shows_draws() -> bool:
    """Whether the memory of both kinds of generators shows each draw, the second of a pair of normal numbers, too.

    Where it does not, as another interpreter or a later version may have it, marks are the states themselves.
    """
    if type(random._inst) is not random.Random:  # type: ignore[attr-defined]
        return False
    python, numpy = random.Random(0), np.random.RandomState(0)
    of_python = (python.random, lambda: python.gauss(0, 1), lambda: python.gauss(0, 1), lambda: python.seed(5))
    of_numpy = (numpy.random_sample, numpy.standard_normal, numpy.standard_normal, lambda: numpy.seed(5))
    for draws, look in ((of_python, lambda: _python_memory(python)), (of_numpy, lambda: _numpy_memory(numpy))):
        for draw in draws:
            before = look()
            draw()
            if look() == before:
                return False
    return True


@functools.cache
def _watched() -> ReplacedFunctions:
    """Returns the functions by which the whole process draws, and seeds."""
    functions = [(module, name, getattr(module, name)) for module in (random, np.random) for name in dir(module)]
    own, free = _generators(), (np.random.seed, np.random.sample, np.random.ranf)
    return ReplacedFunctions(
        [(m, name) for m, name, value in functions if getattr(value, "__self__", None) in own or value in free],
        _drawing,
    )
