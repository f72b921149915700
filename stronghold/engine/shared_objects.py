"""The objects by which one hook may leave another something."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_CONSTANT = (str, bytes, int, float, complex, type(None), type, Enum, BuiltinFunctionType, ModuleType)
_CONSTANT += (torch.dtype, torch.device)  # type: ignore[assignment]


def objects_of(hook: Any) -> set[int]:
    """Returns the identities of what a callable has by itself.

    That is its ``__self__``, what its closure, defaults and arguments of ``partial`` hold and the globals it names, and
    the same of functions among them; not what these objects hold, nor numbers, text, types and functions.
    """
    return {id(value) for value in _objects(hook, set())}


def _objects(value: Any, seen: set[int]) -> Iterator[Any]:
    if isinstance(value, _CONSTANT) or id(value) in seen:
        return
    seen.add(id(value))
    inner: list[Any] = []
    if isinstance(value, FunctionType):
        inner += (_content(cell) for cell in value.__closure__ or ())
        inner += (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        inner += (value.__globals__.get(name) for name in value.__code__.co_names)
    elif isinstance(value, MethodType):
        inner += (value.__self__, value.__func__)
    elif isinstance(value, partial):
        inner += (value.func, *value.args, *value.keywords.values())
    else:
        yield value
    for item in inner:
        yield from _objects(item, seen)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been assigned yet
        return None
