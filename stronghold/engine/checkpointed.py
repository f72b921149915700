"""Activation checkpointing of which an error leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint


def checkpointed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns ``function(*args, **kwargs)``, which runs again in the backward pass, by non-reentrant checkpoint.

    What its first run raises is raised when checkpoint has returned. Where an error passes through it before PyTorch
    2.13, its hooks stay until the error is let go: whatever is saved for a backward pass in between, of any model,
    would be computed by ``function``.
    """
    run = _Run(function)
    output = checkpoint(run, *args, use_reentrant=False, **kwargs)
    if run.failed:
        raise run.failed.pop()
    return output


class _Run:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._is_first = True
        self.failed: list[BaseException] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_first:
            return self._function(*args, **kwargs)
        self._is_first = False
        try:
            return self._function(*args, **kwargs)
        except BaseException as error:
            self.failed.append(error)
            return None
