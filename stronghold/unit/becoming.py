"""A parameter's class tells where its values are: one object is an ordinary parameter, and one in a slot, in turn."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable

import torch
from torch import nn

from stronghold.unit.packed import StaysInPlace

becoming = threading.RLock()
"""Held while classes change: what comes to a slot has its class before its values, what goes back has it behind."""


def become(kind: type[nn.Parameter], parameters: Iterable[nn.Parameter]) -> None:
    """Changes the class of parameters to ``kind``, or to one that is of their own class, too."""
    with becoming, torch._C.DisableTorchFunctionSubclass():
        for parameter in parameters:
            own = parameter.__dict__.get("_own_class")
            parameter.__class__ = kind if own is None else _both(kind, own)


@functools.cache
def _both(kind: type[nn.Parameter], own: type[nn.Parameter]) -> type[nn.Parameter]:
    """Returns a class that is both, by the name of ``own``: PEFT tells quantised weights by the name of their class."""
    return type(own.__name__, (StaysInPlace, kind, own), {})
