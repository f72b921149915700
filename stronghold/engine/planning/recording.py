"""Records what a computation on fake tensors consists of: its operators, and the memory that is alive meanwhile."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
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
_DEVICE_OF = torch.ops.prim.device.default


class Recording(TorchDispatchMode):
    """Counts operators into ``ops``, by whoever sets that, and follows the bytes of what they allocate.

    ``live_bytes`` are those that are alive, ``peak_bytes`` the most there were since :meth:`begin`; each tensor takes a
    multiple of ``block_bytes``. ``computed`` counts the operators that have allocated or added up anything.

    ``fused`` tells that dropout is one operator on the device, whose mask has a byte for each element. On the CPU, as
    which tensors without memory are computed, it is several: ``empty_like``, ``bernoulli_``, and a product.

    Autograd adds up gradients in place where nothing else has the sum so far, but never under a mode such as this one.
    Here it is told what it would have had in place, so that no memory counts that training does not take.
    """

    def __init__(self, block_bytes: int = 1, *, fused: bool = False) -> None:
        super().__init__()
        self._block_bytes, self._fused = block_bytes, fused
        self.ops: Counter[Op] = Counter()
        self.live_bytes = self.peak_bytes = self.computed = 0
        self._known = WeakIdKeyDictionary()  # storages, with what each takes, in a list of its own
        self._before: Any = None
        self._paused = False
        _alone()  # not for the first time in a backward pass

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
        # Autograd asks for it twice as often as it computes anything.
        if func is _DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func is torch.ops.aten.add.Tensor and _is_sum_in_place(args):
            self.computed += 1
            if not self._paused:
                dtype = str(args[0].dtype).removeprefix("torch.")
                self.ops[Op("other", dtype, (), 0, 3 * args[0].numel() * args[0].element_size())] += 1
            return args[0]
        out = func(*args, **(kwargs or {}))
        found = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        new = [tensor for tensor in found if self._is_new(tensor, given)]
        if self._paused:
            return out
        self.computed += len(new)
        for tensor in new:
            self._follow(tensor.untyped_storage())
        if (
            self._fused
            and func is torch.ops.aten.bernoulli_.float
            and self._before is torch.ops.aten.empty_like.default
        ):
            self._shrink(args[0])
        self._before = func
        if new or (found and func._schema.is_mutable):
            self.ops[_op(func, args, kwargs or {}, out, given, found)] += 1
        return out

    def size_of(self, tensor: Tensor) -> int:
        """Returns what a tensor's elements take if they are all that is in its memory."""
        return round_up(tensor.numel() * tensor.element_size(), self._block_bytes)

    def _is_new(self, tensor: Tensor, given: list[Tensor]) -> bool:
        storage = tensor.untyped_storage()
        known = storage in self._known or any(other.untyped_storage() is storage for other in given)
        if not known:
            self._known[storage] = [0]
        return not known

    def _follow(self, storage: torch.UntypedStorage) -> None:
        taken = self._known[storage]
        taken[0] = round_up(storage.nbytes(), self._block_bytes)
        self.live_bytes += taken[0]
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._gone, taken).atexit = False

    def _shrink(self, mask: Tensor) -> None:
        taken = self._known[mask.untyped_storage()]
        before, taken[0] = taken[0], min(taken[0], round_up(mask.numel(), self._block_bytes))
        self.live_bytes += taken[0] - before

    def _gone(self, taken: list[int]) -> None:
        self.live_bytes -= taken[0]


class _References(NamedTuple):
    """How many have a tensor and its memory, as PyTorch counts them while an operator is called with it."""

    tensor: int
    storage: int

    @classmethod
    def of(cls, tensor: Tensor) -> _References:
        return cls(tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # type: ignore[attr-defined]


def _is_sum_in_place(args: tuple) -> bool:
    """Whether this is autograd's own sum of two gradients, into the first of which it may write.

    It may if that has no gaps, and nobody else has it (``can_accumulate_inplace`` in torch's input_buffer.cpp).
    """
    if torch._C._current_graph_task_id() < 0 or torch.is_grad_enabled() or len(args) != 2:
        return False
    first, second = args
    if not isinstance(second, Tensor) or first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.ops.aten.is_non_overlapping_and_dense.default(first) and _References.of(first) == _alone()


class _Seen(TorchDispatchMode):
    """Calls ``seen`` with the first argument of each sum."""

    def __init__(self, seen: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.add.Tensor:
            self._seen(args[0])
        return func(*args, **(kwargs or {}))


@cache
def _alone() -> _References:
    """Returns what is counted of a gradient that nobody else has, as autograd adds another one to it."""
    found: list[_References] = []
    with torch.enable_grad():
        x = torch.ones(2, requires_grad=True, device="cpu")
        both = x * 2, x * 3
    with _Seen(lambda tensor: found.append(_References.of(tensor))):
        torch.autograd.grad(both, x, (torch.ones_like(x), torch.ones_like(x)))
    return found[-1]


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
    parts = 0
    if name == "dequantise":
        kind, moved = f"transcendental {args[-1]}", args[1] + out.numel() * out.element_size()
    if "scaled_dot_product" in name:
        kind = "attention backward" if "backward" in name else "attention"
        query, key = given[1:3] if "backward" in name else given[:2]
        sizes = (*query.shape[:3], key.shape[2], query.shape[3])
        flops = (10 if "backward" in name else 4) * math.prod(sizes)
        parts = math.prod(key.shape[:2]) if "backward" in name else 0
        kind += "" if _is_causal(func, args, kwargs) else " without a mask"
    elif name in _PRODUCTS:
        kind = "matmul"
        one, other = (args[place] for place in _PRODUCTS[name])
        sizes = (*([1] if one.ndim == 2 else []), *one.shape[:-1], other.shape[-1], one.shape[-1])
    elif flops:  # a convolution, as the product that it is made into
        kind, rows = "matmul", max(1, found[0].numel() // found[0].shape[1])
        columns = found[0].shape[1]
        sizes = (1, rows, columns, max(1, flops // (2 * rows * columns)))
    return Op(kind, dtype.removeprefix("torch."), sizes, flops, moved, parts)
