"""Parametrized weights of a layer that runs again, which torch may keep from one use to the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.utils import parametrize

from stronghold.errors import OffloadedModelError


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
