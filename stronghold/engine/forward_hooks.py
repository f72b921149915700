"""Which forward hooks of the user's run again in a layer's second run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from stronghold.engine.shared_objects import objects_of
from stronghold.engine.traces import Attributes, Trace
from stronghold.errors import OffloadedModelError

_EVERY_MODULE = -1
"""In the place of a module's number: hooks of ``torch.nn.modules.module.register_module_forward_hook``."""
_Key = tuple[int, int, str]
"""A hook's number, its module's, and its kind. Numbers go up, whatever a hook is registered on."""
_Aside = Callable[[], AbstractContextManager[None]]


class ForwardHooks:
    """Runs the forward hooks of the first run again, but for those that only look.

    A hook that returned None in the first run and left its arguments, its layer's modules and the random numbers that
    come as they were records something; a second call would record it twice. One that changed them belongs to the
    computation and runs again, and so do those that share an object with it, in which they may leave something. So do
    those that a hook registers during the first run, which stay from then on, as on the plain model. What is registered
    during the second run is what the first has registered already, and goes again; so do hooks of gradients, on modules
    and their parameters.

    What a hook has autograd save is kept, ``aside`` of what a checkpoint counts: it saves as much in either run, or the
    second one is refused, and a hook that only looks is not in that one. What such a hook computed with a graph, a
    penalty on what it saw, is the first run's then.

    Hooks are exchanged in the modules' own dictionaries, to which the handles of those that come and go refer.
    """

    _KINDS = ("_forward_pre_hooks", "_forward_hooks")

    def __init__(self, modules: Sequence[weakref.ref[nn.Module]]) -> None:
        self._modules = modules  # the first is the layer, whose own hooks run outside of it, and once
        self._changing: set[_Key] = set()
        """Those that have changed something."""
        self._own: dict[_Key, Callable] = {}
        """During a run, the user's hooks in whose place others are."""
        self._attributes = Attributes(())
        """During the first run with hooks, those of the layer's modules."""

    @contextmanager
    def first(self, aside: _Aside = nullcontext) -> Iterator[None]:
        """Runs the block and notes which hooks do more than look."""
        keys = self._keys()
        if keys:
            self._attributes = Attributes(m for reference in self._modules if (m := reference()) is not None)
        try:
            with self._instead(keys, partial(self._observed, aside, _top())):
                yield
        finally:
            self._attributes = Attributes(())  # the others hold the modules
        if self._changing and len(self._changing) < len(keys):
            self._add_sharing(keys - self._changing)

    @contextmanager
    def again(self, aside: _Aside = nullcontext) -> Iterator[None]:
        """Runs the block with those alone. Raises OffloadedModelError where the user has removed one since."""
        here, before = self._keys(), RemovableHandle.next_id
        if gone := self._changing - here:
            number = min(gone)[1]
            whose = "all modules" if number == _EVERY_MODULE else f"a {type(self._modules[number]()).__name__}"
            raise OffloadedModelError(
                "a layer runs again in the backward pass, with the hooks that changed something in its forward pass "
                f"(one of {whose} has been removed in between); remove it after backward(), or use "
                "offload(..., activations='keep')"
            )
        try:
            with self._instead(here, partial(self._repeated, aside, _top())):
                yield
        finally:
            if RemovableHandle.next_id != before:  # most often nothing is registered
                self._remove(self._since(before))
                self._remove_others(before)

    def _remove_others(self, since: int) -> None:
        """Removes hooks of gradients, on modules and their parameters, whose numbers are ``since`` or higher."""
        for module in (m for reference in self._modules if (m := reference()) is not None):
            _remove_since(since, module._backward_hooks, module._backward_pre_hooks)
            remove_gradient_hooks((p for p in module._parameters.values() if p is not None), since=since)

    def _add_sharing(self, looking: set[_Key]) -> None:
        """Counts those among ``looking`` that share an object with one that changes something as changing, too."""
        new = {*self._changing}
        objects = {key: objects_of(self._hooks(key[1], key[2]).get(key[0])) for key in looking | new if key[1]}
        while new:
            reached = set().union(*(objects.get(key, ()) for key in new))
            new = {key for key in looking - self._changing if not reached.isdisjoint(objects.get(key, ()))}
            self._changing |= new

    def _hooks(self, number: int, kind: str) -> dict[int, Callable]:
        if number == _EVERY_MODULE:
            every: dict[int, Callable] = getattr(torch.nn.modules.module, f"_global{kind}")
            return every
        module = self._modules[number]()
        found: dict[int, Callable] = {} if module is None else getattr(module, kind)
        return found

    def _keys(self) -> set[_Key]:
        found: set[_Key] = set()
        for number, reference in enumerate(self._modules):
            module = reference()
            if module is not None and (module._forward_pre_hooks or module._forward_hooks):  # most have none
                found.update((handle, number, kind) for kind in self._KINDS for handle in self._hooks(number, kind))
        found.update((h, _EVERY_MODULE, kind) for kind in self._KINDS for h in self._hooks(_EVERY_MODULE, kind))
        return found

    def _since(self, number: int) -> set[_Key]:
        """Returns the hooks that were registered when the next hook's number was ``number``, or later."""
        if RemovableHandle.next_id == number:  # most often, and after every call of a hook
            return set()
        return {key for key in self._keys() if key[0] >= number}

    @contextmanager
    def _instead(self, keys: Iterable[_Key], replace: Callable[[_Key, Callable], Callable]) -> Iterator[None]:
        self._exchange(keys, replace)
        try:
            yield
        finally:
            for (handle, number, kind), hook in self._own.items():
                if handle in (hooks := self._hooks(number, kind)):
                    hooks[handle] = hook
            self._own.clear()

    def _exchange(self, keys: Iterable[_Key], replace: Callable[[_Key, Callable], Callable]) -> None:
        for key in keys:
            handle, number, kind = key
            if number:
                hooks = self._hooks(number, kind)
                self._own[key] = hooks[handle]
                hooks[handle] = replace(key, hooks[handle])

    def _remove(self, keys: Iterable[_Key]) -> None:
        for handle, number, kind in keys:
            self._hooks(number, kind).pop(handle, None)

    def _observed(self, aside: _Aside, top: Any, key: _Key, hook: Callable) -> Callable:
        def observe(module: nn.Module, *rest: Any) -> Any:
            number = RemovableHandle.next_id
            before = None if key in self._changing else Trace(module, rest, self._attributes)
            with aside() if _top() is top else nullcontext():
                result = hook(module, *rest)
            if before and (result is not None or Trace(module, rest, self._attributes).differs(before)):
                self._changing.add(key)
            self._exchange(self._since(number), partial(self._observed, aside, top))
            return result

        return observe

    def _repeated(self, aside: _Aside, top: Any, key: _Key, hook: Callable) -> Callable:
        def repeat(*rest: Any) -> Any:
            number = RemovableHandle.next_id
            with aside() if _top() is top else nullcontext():
                result = hook(*rest)
            self._remove(self._since(number))
            return result

        return repeat if key in self._changing else _nothing


def remove_gradient_hooks(parameters: Iterable[nn.Parameter], *, since: int) -> None:
    """Removes the hooks of parameters that were registered when the next hook's number was ``since``, or later."""
    if RemovableHandle.next_id == since:
        return
    with torch._C.DisableTorchFunctionSubclass():
        for parameter in parameters:
            own = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
            _remove_since(since, *own)


def _remove_since(since: int, *hooks: dict[int, Callable] | None) -> None:
    for some in hooks:
        for handle in [handle for handle in some or {} if handle >= since]:
            assert some is not None
            del some[handle]


def _nothing(*_: Any) -> None:
    """Stands for a hook that only looks."""


def _top() -> Any:
    """Returns what packs saved tensors here: another inside a checkpoint of the layer's own, which counts by itself."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks and hooks[0]
