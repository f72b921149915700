"""Activation checkpointing of which an error leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from stronghold.errors import OffloadedModelError


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


class ParametrizationCache:
    """Lets a layer's second run compute parametrized weights as often as the first has, which may be in ``cached()``.

    What ``torch.nn.utils.parametrize.cached()`` keeps of the first run's would leave the second with less to compute
    than the first, and where its block has ended by then, with more.
    """

    def __init__(self, module: nn.Module, layer: str) -> None:
        """Raises OffloadedModelError where the first run would find values of an earlier one's graph in the cache."""
        self._is_on = parametrize._cache_enabled > 0
        if self._is_on and not {key[0] for key in parametrize._cache}.isdisjoint(map(id, module.modules())):
            raise OffloadedModelError(
                "a layer that runs again in the backward pass cannot take parametrized weights from another run (got "
                f"those of {layer}, which torch.nn.utils.parametrize.cached() keeps); have each layer run once in "
                "each cached(), without micro_batch, or use offload(..., activations='keep')"
            )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Runs the block with a cache as the first run found it: none, or one without values."""
        before = parametrize._cache_enabled, parametrize._cache
        parametrize._cache_enabled, parametrize._cache = int(self._is_on), {}
        try:
            yield
        finally:
            parametrize._cache_enabled, parametrize._cache = before


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
