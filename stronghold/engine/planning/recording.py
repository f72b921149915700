"""Records what a computation on fake tensors consists of: its operators, and the memory that is alive meanwhile."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from stronghold.layout import round_up
from stronghold.planner.op_costs import Op

_PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}
"""The operators that are one product, with the places of its factors."""
_TRANSCENDENTAL = ("gelu", "softmax", "silu", "norm", "tanh", "exp", "erf", "sigmoid", "dropout", "bernoulli")
"""What is in the names of those."""


class Recording(TorchDispatchMode):
    """Counts operators into ``ops``, by whoever sets that, and follows the bytes of what they allocate.

    ``live_bytes`` are those that are alive, ``peak_bytes`` the most there were since :meth:`begin`; each tensor takes a
    multiple of ``block_bytes``.
    """

    def __init__(self, block_bytes: int = 1) -> None:
        super().__init__()
        self._block_bytes = block_bytes
        self.ops: Counter[Op] = Counter()
        self.live_bytes = self.peak_bytes = 0
        self._known = WeakIdKeyDictionary()
        self._paused = False

    def begin(self, ops: Counter[Op]) -> None:
        """Counts into ``ops`` from now on, and the peak from what is alive."""
        self.ops, self.peak_bytes = ops, self.live_bytes

    def go_on(self, ops: Counter[Op]) -> None:
        """Counts into ``ops`` from now on; the peak stays."""
        self.ops = ops

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What the block computes and allocates does not count."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What the block computes does not count; what it allocates does."""
        before, self.ops = self.ops, Counter()
        try:
            yield
        finally:
            self.ops = before

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        new = [tensor for tensor in found if self._is_new(tensor, given)]
        if self._paused:
            return out
        for tensor in new:
            self._follow(tensor.untyped_storage())
        if new or (found and func._schema.is_mutable):
            self.ops[_op(func, args, kwargs or {}, out, given, found)] += 1
        return out

    def _is_new(self, tensor: Tensor, given: list[Tensor]) -> bool:
        storage = tensor.untyped_storage()
        known = storage in self._known or any(other.untyped_storage() is storage for other in given)
        self._known[storage] = True
        return not known

    def _follow(self, storage: torch.UntypedStorage) -> None:
        size = round_up(storage.nbytes(), self._block_bytes)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._gone, size).atexit = False

    def _gone(self, size: int) -> None:
        self.live_bytes -= size


def _is_causal(func: Any, args: tuple, kwargs: dict) -> bool:
    names = [one.name for one in func._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("is_causal", False))


def _op(func: Any, args: tuple, kwargs: dict, out: Any, given: list[Tensor], found: list[Tensor]) -> Op:
    name = func.overloadpacket.__name__
    dtype = str(next((t.dtype for t in (*found, *given) if t.is_floating_point()), torch.float32))
    moved = sum({id(t.untyped_storage()): t.numel() * t.element_size() for t in (*given, *found)}.values())
    flops = (
        flop_registry[func.overloadpacket](*args, **kwargs, out_val=out) if func.overloadpacket in flop_registry else 0
    )
    function = next((part for part in _TRANSCENDENTAL if part in name), None)
    kind = "other" if function is None else f"transcendental {function}{' backward' if 'backward' in name else ''}"
    sizes: tuple[int, ...] = ()
    if "scaled_dot_product" in name:
        kind = "attention backward" if "backward" in name else "attention"
        query, key = given[1:3] if "backward" in name else given[:2]
        sizes = (*query.shape[:3], key.shape[2], query.shape[3])
        flops = (10 if "backward" in name else 4) * math.prod(sizes)
        kind += "" if _is_causal(func, args, kwargs) else " without a mask"
    elif name in _PRODUCTS:
        kind = "matmul"
        one, other = (args[place] for place in _PRODUCTS[name])
        sizes = (*([1] if one.ndim == 2 else []), *one.shape[:-1], other.shape[-1], one.shape[-1])
    elif flops:  # a convolution, as the product that it is made into
        kind, rows = "matmul", max(1, found[0].numel() // found[0].shape[1])
        columns = found[0].shape[1]
        sizes = (1, rows, columns, max(1, flops // (2 * rows * columns)))
    return Op(kind, dtype.removeprefix("torch."), sizes, flops, moved)
