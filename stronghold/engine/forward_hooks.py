"""Which forward hooks of the user's run again in a layer's second run."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from stronghold.errors import OffloadedModelError

_ABSENT = object()


class ForwardHooks:
    """Runs the forward hooks of the first run again, but for those that only look.

    A hook that returned None in the first run and left its arguments and its module as they were records something; a
    second call would record it twice. One that changed them belongs to the computation and runs again.
    """

    _KINDS = ("_forward_pre_hooks", "_forward_hooks")

    def __init__(self, module: nn.Module) -> None:
        self._inner = [weakref.ref(m) for m in module.modules() if m is not module]
        self._changing: set[tuple[int, int, str]] = set()
        """Those that have changed something: each hook's number, its module's, and its kind."""

    @contextmanager
    def first(self) -> Iterator[None]:
        """Runs the block and notes which hooks do more than look."""
        with self._instead(self._observed):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Runs the block with those alone. Raises OffloadedModelError where the user has removed one since."""
        here = {key for _, _, _, keys in self._there() for key in keys}
        if gone := self._changing - here:
            module = self._inner[min(gone)[1]]()
            raise OffloadedModelError(
                "a layer runs again in the backward pass, with the hooks that changed something in its forward pass "
                f"(one of a {type(module).__name__} has been removed in between); remove it after backward(), or use "
                "offload(..., activations='keep')"
            )
        with self._instead(lambda key, hook: hook if key in self._changing else None):
            yield

    def _there(self) -> Iterator[tuple[nn.Module, str, dict[int, Callable], list[tuple[int, int, str]]]]:
        for number, reference in enumerate(self._inner):
            if (module := reference()) is not None and (module._forward_hooks or module._forward_pre_hooks):
                for kind in self._KINDS:
                    hooks = getattr(module, kind)
                    yield module, kind, hooks, [(handle, number, kind) for handle in hooks]

    @contextmanager
    def _instead(self, replace: Callable[[tuple[int, int, str], Callable], Callable | None]) -> Iterator[None]:
        originals = list(self._there())
        for module, kind, hooks, keys in originals:
            new = ((key[0], replace(key, hook)) for key, hook in zip(keys, hooks.values(), strict=True))
            setattr(module, kind, OrderedDict((handle, hook) for handle, hook in new if hook is not None))
        try:
            yield
        finally:
            for module, kind, hooks, _ in originals:
                setattr(module, kind, hooks)

    def _observed(self, key: tuple[int, int, str], hook: Callable) -> Callable:
        def observe(module: nn.Module, *rest: Any) -> Any:
            before = _versions(rest), dict(vars(module))
            result = hook(module, *rest)
            values = [before[1].get(name, _ABSENT) is value for name, value in vars(module).items()]
            if result is not None or _versions(rest) != before[0] or not all(values) or len(values) != len(before[1]):
                self._changing.add(key)
            return result

        return observe


def _versions(output: Any) -> list[int]:
    if isinstance(output, Tensor):
        return [output._version]
    if isinstance(output, (list, tuple)):
        return [version for item in output for version in _versions(item)]
    if isinstance(output, dict):
        return [version for item in output.values() for version in _versions(item)]
    return []
