"""Layer-major micro-batches: one layer runs over the batch a few samples at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from stronghold.engine.copying import Memo, structural_copy
from stronghold.engine.joining import Joiner, NotCutError

Call = tuple[tuple[Any, ...], dict[str, Any]]


def batch_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """Returns the tensor whose first dimension is the batch: the first floating one of two dimensions or more."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2:
            return value
    return None


def split(args: Sequence[Any], kwargs: dict[str, Any], size: int, module: nn.Module | None = None) -> list[Call]:
    """Returns the arguments of ``MicroBatches``."""
    return MicroBatches(args, kwargs, size, module).calls


class MicroBatches:
    """The arguments of a layer, cut into micro-batches of ``size`` samples; one where there is nothing to cut.

    Tensors whose first dimension is the batch are cut, in containers and caches too; all others (positions, masks
    that broadcast) go to every piece, and so do all items of a list, be there as many as samples. All parts of a tensor
    are one function's for autograd, which puts their gradients together at once: cut one by one, each would be added to
    zeros as long as the batch. Autograd therefore refuses to write into one in place. Raises NotCutError for a tensor
    whose first dimension could as well be another, because the batch is as long as the sequence, or has as many samples
    as the layer, ``module``, has heads; for two that differ in the first dimension alone, as where it is the sequence;
    and for a mask of flex attention that was made for each sample.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], size: int, module: nn.Module | None = None) -> None:
        self._parts: dict[int, tuple[Tensor, Sequence[Tensor]]] = {}
        self._memos: list[Memo] = []
        self.calls: list[Call] = [(tuple(args), kwargs)]
        """The arguments for each."""
        leader = batch_of(args, kwargs)
        if leader is None or leader.shape[0] <= size:
            return
        self._is_cut = _Cut(leader, [*args, *kwargs.values()], module)
        self._module = module
        self.calls = []
        for number in range(-(-leader.shape[0] // size)):
            piece, memo = partial(self._piece, size, number), Memo()
            copied = [structural_copy(value, piece, memo) for value in args]
            named = {name: structural_copy(value, piece, memo) for name, value in kwargs.items()}
            self.calls.append((tuple(copied), named))
            self._memos.append(memo)
        _check_block_masks(self._memos[0], leader.shape[0])
        whole = (tensor for tensor, found in self._parts.values() if not found and not tensor.is_inference())
        self._versions = [(tensor, tensor._version) for tensor in whole]

    def _piece(self, size: int, number: int, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._parts:
            self._parts[id(tensor)] = tensor, tensor.split(size) if self._is_cut(tensor) else ()
        _, found = self._parts[id(tensor)]
        return found[number] if found else tensor

    @contextmanager
    def explained(self, layer: str) -> Iterator[None]:
        """Adds to an error of the layer's own code that it ran for a micro-batch, of which that knows nothing."""
        try:
            yield
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            if sys.version_info >= (3, 11):
                error.add_note(
                    f"{layer} ran for one of {len(self.calls)} micro-batches: micro_batch needs the batch as first "
                    "dimension of what a layer gets, and of what it takes it from; offload without micro_batch if it "
                    "is another"
                )
            raise

    def join(self, outputs: Sequence[Any]) -> Any:
        """Returns the output of the layer for all, and writes into the arguments what it has written into their copies.

        Raises NotCutError where either cannot be told from what the layer did for each micro-batch.
        """
        for tensor, version in self._versions:
            if tensor._version != version:
                raise NotCutError(
                    f"micro_batch must not change what a layer computes (got one that writes an argument of shape "
                    f"{tuple(tensor.shape)} in place, once for each micro-batch); offload without micro_batch"
                )
        leaders = [leader.shape for call in self.calls if (leader := batch_of(*call)) is not None]
        joiner = Joiner(leaders, self._memos, self._parts, own=lambda: kernels_of(self._module))
        joiner.write_back()
        return joiner.join(outputs)


class _Cut:
    """Says which of the tensors beside ``leader``, of shape (batch, …), have the batch as first dimension."""

    def __init__(self, leader: Tensor, given: Sequence[Any], module: nn.Module | None) -> None:
        self._leader, self._given, self._module = leader, given, module

    def __call__(self, tensor: Tensor) -> bool:
        batch, others = self._leader.shape[0], self._leader.shape[1:]
        if tensor.ndim == 0 or tensor.shape[0] != batch:
            # XLNet's layers get positions beside the tokens so, of which there are others.
            if tensor.ndim == 3 and tensor.shape[1:] == others and tensor.shape[0] > 1 and tensor.is_floating_point():
                self._refuse(tensor, "the sequence, with the batch behind it", "give layers the batch first")
            return False
        if tensor.shape == self._leader.shape or tensor.ndim > 3:
            return True
        if tensor.ndim < 3 and tensor.ndim != self._leader.ndim and batch in others[: 3 - tensor.ndim]:
            if tensor.ndim == 1 and not tensor.is_floating_point():
                return False  # positions
            self._refuse(tensor, "another", "change the batch size or the length")
        if self._leader.ndim == 3 and self._may_be_table(tensor):
            remedy = "change the batch size, or give what has a row for each sample four dimensions"
            self._refuse(tensor, "that of a table, such as the sizes of levels", remedy)
        if self._leader.ndim == 3 and self._may_be_heads(tensor):
            self._refuse(tensor, "that of heads", "give it four dimensions, change the batch size")
        return True

    def _may_be_table(self, tensor: Tensor) -> bool:
        """Whether whole numbers have too few columns for one of each token.

        Deformable attention gets the height and width of each level of an image so.
        """
        numbers = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
        return numbers and tensor.ndim == 2 and 1 < tensor.shape[1] < min(self._lengths())

    def _lengths(self) -> set[int]:
        """Returns the lengths of the sequences that the layer gets."""
        return {self._leader.shape[1], *(t.shape[1] for t in self._given if _is_state(t, self._leader))}

    def _may_be_heads(self, tensor: Tensor) -> bool:
        """Whether a tensor has the shape of a bias of attention's scores, one for each head, and as many as heads.

        Without ``heads`` that the layer's modules know of it is the shape alone that tells, of three dimensions.
        """
        if tensor.ndim < 3 and not tensor.is_floating_point():
            return False  # indices, masks of tokens
        (length, width), lengths = self._leader.shape[1:], self._lengths() - {1}
        if tensor.shape[-1] == width and width not in lengths:
            return False
        like = tensor.ndim == 1 or tensor.shape[-1] in lengths
        if tensor.ndim == 3:
            _, row, column = tensor.shape
            like = row == column or row == 1 or (row == length and like)
        heads = heads_of(self._module) if like and self._module is not None else set()
        if heads:
            return like and tensor.shape[0] in heads
        return like and tensor.ndim == 3 and tensor.shape[-1] in lengths and tensor.shape[1] in (1, length)

    def _refuse(self, tensor: Tensor, what: str, remedy: str) -> None:
        raise NotCutError(
            f"micro_batch must know which arguments have the batch as first dimension (got one of shape "
            f"{tuple(tensor.shape)} beside an input of shape {tuple(self._leader.shape)}: it may as well be {what}); "
            f"{remedy}, or offload without micro_batch"
        )


def _is_state(value: Any, leader: Tensor) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3 and len(value) == len(leader)


def _check_block_masks(memo: Memo, batch: int) -> None:
    """Raises NotCutError where flex attention's mask of each sample is among the arguments."""
    if (flex := sys.modules.get("torch.nn.attention.flex_attention")) is None:
        return  # not imported, it has made no mask
    for given, _ in memo.values():
        if isinstance(given, flex.BlockMask) and given.kv_num_blocks.shape[0] == batch:
            raise NotCutError(
                "micro_batch must be able to cut what has the batch as first dimension (got a BlockMask of flex "
                f"attention for {batch} samples: its mask_mod knows a sample by its number in the whole batch); make "
                'it with B=None where it is one for all, pass another attn_implementation, such as "sdpa", or offload '
                "without micro_batch"
            )


_numbers: WeakKeyDictionary[nn.Module, dict[Callable[[str], bool], set[int]]] = WeakKeyDictionary()


def heads_of(module: nn.Module) -> set[int]:
    """Returns the numbers of heads that a layer's modules have as attributes, or in their ``config``."""
    return _numbers_of(module, _counts_heads)


def kernels_of(module: nn.Module | None) -> set[int]:
    """Returns the sizes of convolutions that a layer's modules have as attributes, or in their ``config``.

    Linear attention keeps them beside the states in its cache.
    """
    return set() if module is None else _numbers_of(module, _is_of_convolution)


def _numbers_of(module: nn.Module, is_meant: Callable[[str], bool]) -> set[int]:
    known = _numbers.setdefault(module, {})
    if is_meant not in known:
        named: list[dict[str, Any]] = [vars(part) for part in module.modules()]
        named += [vars(found["config"]) for found in named if hasattr(found.get("config"), "__dict__")]
        items = (item for found in named for item in found.items())
        known[is_meant] = {number for name, number in items if type(number) is int and is_meant(name)}
    return known[is_meant]


def _counts_heads(name: str) -> bool:
    return "head" in name and "dim" not in name and "size" not in name


def _is_of_convolution(name: str) -> bool:
    return "kernel" in name or "conv" in name
