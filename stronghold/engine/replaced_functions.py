"""Functions of modules that are others for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

Function = Callable[..., Any]


class ReplacedFunctions:
    """Replaces ``functions``, by module and name, as long as any thread is in the block.

    ``instead`` returns what stands for one of a name. It is called from all threads, and tells for itself which.
    """

    def __init__(
        self, functions: Iterable[tuple[ModuleType, str]], instead: Callable[[str, Function], Function]
    ) -> None:
        self._functions, self._instead = [*functions], instead
        self._own: list[tuple[ModuleType, str, Function]] = []
        self._blocks, self._lock = 0, threading.Lock()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._blocks:
                self._own = [(module, name, getattr(module, name)) for module, name in self._functions]
                for module, name, own in self._own:
                    setattr(module, name, self._instead(name, own))
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                while not self._blocks and self._own:
                    setattr(*self._own.pop())
