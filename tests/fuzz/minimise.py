"""Makes a failing program smaller: parts go, and what remains becomes the plainest, while it fails alike.

hypothesis shrinks the choices that drew a program, and needs hundreds of runs; one that knows what a program is made of
needs some dozens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from tests.fuzz.programs import Program


def minimise(program: Program, fails: Callable[[Program], bool], seconds: float) -> Program:
    """Returns the smallest program found in ``seconds`` that still ``fails``."""
    until = time.monotonic() + seconds
    while True:
        for candidate in _smaller(program):
            if time.monotonic() > until:
                return program
            if fails(candidate):
                program = candidate
                break
        else:
            return program


def _smaller(program: Program) -> Iterator[Program]:
    """Yields programs that are smaller by one thing, those that are smaller by most first."""
    for operations in _shorter(program.operations):
        yield replace(program, operations=operations)
    for ways in _shorter(program.ways):
        yield replace(program, ways=ways)
    for layers in _shorter(program.model.layers, least=1):
        yield replace(program, model=replace(program.model, layers=layers))
    for model in _plainer(program.model):
        yield replace(program, model=model)
    yield from _plainer(program)
    for name in ("ways", "operations"):
        several = getattr(program, name)
        for number, item in enumerate(several):
            for plainer in _plainer(item):
                yield replace(program, **{name: (*several[:number], plainer, *several[number + 1 :])})
    for number, kind in enumerate(program.model.layers):
        if kind != "linear":
            layers = (*program.model.layers[:number], "linear", *program.model.layers[number + 1 :])
            yield replace(program, model=replace(program.model, layers=layers))


def _shorter(items: tuple[Any, ...], least: int = 1) -> Iterator[tuple[Any, ...]]:
    length = len(items) // 2
    while length:
        for begin in range(len(items) - length, -1, -length):
            if len(items) - length >= least:
                yield items[:begin] + items[begin + length :]
        length //= 2


def _plainer(thing: Any) -> Iterator[Any]:
    plainest = type(thing)()
    for item in fields(thing):
        value, plain = getattr(thing, item.name), getattr(plainest, item.name)
        if value == plain or item.name in ("layers", "operations", "ways", "model"):
            continue
        yield replace(thing, **{item.name: plain})
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 1:
            yield replace(thing, **{item.name: value // 2})
