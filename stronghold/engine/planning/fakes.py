"""Tensors without memory, with less of PyTorch's own work around each operator."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from stronghold.engine.planning.draws import no_layer_dropped

_SPECIAL = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view}
_SPECIAL_NAMES = ("convolution", "_foreach_", "_to_copy")
"""In the names of operators whose strides or device FakeTensorMode works out in ways of its own."""
_PLAIN = {bool, int, float, str, torch.dtype, torch.layout, torch.memory_format}
"""Arguments that a call may have beside tensors of the mode, for its kernel to be asked at once."""


class Fakes(FakeTensorMode):
    """PyTorch's mode for fake tensors, which asks an operator's meta kernel at once where that gives the same.

    What PyTorch does around that kernel, most of it in Python, takes several times as long. Whether the kernel alone
    gives the same is seen when an operator is called for the first time: shapes, strides, types, and which tensors have
    their memory in common. Where what it gives has memory of its own, the kernel is asked once for each kind of call.

    What the model makes under it without a ``device`` is on the CPU as all else is, whatever the user's default device.
    What it checks of a tensor's values by ``torch._check_tensor_all`` holds, a number that it draws to drop a layer by
    (LayerDrop: Fan et al. 2020) drops none, PyTorch's, Python's or NumPy's, and unless ``is_packed``, a model of
    transformers takes the tokens of a sample for one sequence.
    """

    is_packed = False

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._direct: dict[Any, bool] = {}
        self._known: dict[Hashable, _Result | None] = {}
        self._entered: list[ExitStack] = []

    def __enter__(self) -> Fakes:
        super().__enter__()
        self._entered.append(ExitStack())
        self._entered[-1].enter_context(_checks_hold())
        self._entered[-1].enter_context(no_layer_dropped())
        if not self.is_packed:
            self._entered[-1].enter_context(one_sequence_each())
        if torch._C._len_torch_function_stack() > 0:  # a default device may be among the modes: each call takes longer
            self._entered[-1].enter_context(torch.device("cpu"))
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().close()
        super().__exit__(*error)

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.rand.default and not args[0]:
            return self._largest(**kwargs)
        if self._direct.get(func) is False:
            return super().dispatch(func, types, args, kwargs)
        tensors, key = list[FakeTensor](), list[Hashable]([func])
        if not self._describe(args, tensors, key) or not self._describe(kwargs.values(), tensors, key) or not tensors:
            return super().dispatch(func, types, args, kwargs)
        if func not in self._direct:
            expected = super().dispatch(func, types, args, kwargs)
            self._direct[func] = _is_ordinary(func) and self._is_same(func, args, kwargs, tensors, expected)
            return expected
        kind = (*key, *kwargs)
        if (result := self._known.get(kind)) is not None:
            return result.again(self, tensors)
        found = self._asked(func, args, kwargs, tensors[0].fake_device)
        if kind not in self._known:
            self._known[kind] = _Result.of(found, tensors)
        return found

    def _largest(self, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        """Returns what ``torch.rand([])`` may give that is nearest to 1: ``rand < layerdrop`` skips no layer by it.

        transformers draws so which layers of speech and translation models are left out of a step.
        """
        dtype = dtype or torch.get_default_dtype()
        largest = torch.tensor(1 - torch.finfo(dtype).eps, dtype=dtype, device="cpu")
        return self.fake_tensor_converter.from_real_tensor(self, largest, make_constant=True)

    def _describe(self, values: Iterable[Any], tensors: list[FakeTensor], key: list[Hashable]) -> bool:
        """Adds what a kernel is called with; returns whether that is plain: tensors of this mode on one device."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self or value.constant is not None:
                    return False
                if tensors and value.fake_device != tensors[0].fake_device:
                    return False
                tensors.append(value)
                key.append((value.shape, value.stride(), value.dtype, value.storage_offset()))
            elif kind is list or kind is tuple:
                key.append((kind, len(value)))
                if not self._describe(value, tensors, key):
                    return False
            elif value is None or kind in _PLAIN:
                key.append((kind, value))
            else:
                return False
        return True

    def _asked(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> Any:
        def wrapped(one: Any) -> Any:
            return FakeTensor(self, one, device) if type(one) is Tensor else one

        with in_kernel_invocation_manager(self):
            found = func(*args, **kwargs)
        return wrapped(found) if isinstance(found, Tensor) else type(found)(map(wrapped, found))

    def _is_same(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[FakeTensor], expected: Any
    ) -> bool:
        try:
            found = self._asked(func, args, kwargs, tensors[0].fake_device)
        except (RuntimeError, NotImplementedError, TypeError):  # it has no kernel of its own
            return False
        return type(found) is type(expected) and _described(found, tensors) == _described(expected, tensors)


class _Result(NamedTuple):
    """What an operator gives: tensors with memory of their own, by their sizes, or given ones, by their places."""

    kind: type[Any]
    each: tuple[Any, ...]

    @classmethod
    def of(cls, found: Any, given: Sequence[FakeTensor]) -> _Result | None:
        """Returns None where that is anything else."""
        every = [found] if isinstance(found, Tensor) else [*found]
        each = list[Any]()
        for one in every:
            place = next((place for place, other in enumerate(given) if other is one), None)
            if place is not None or one is None:
                each.append(place)
                continue
            spanned = 1 + sum((size - 1) * step for size, step in zip(one.shape, one.stride(), strict=True))
            spanned_bytes = spanned * one.element_size() if one.numel() else 0
            fills = not one.storage_offset() and one.untyped_storage().nbytes() == spanned_bytes
            if not fills or _shares(
                one, [*given, *(other for other in every if other is not one and other is not None)]
            ):
                return None
            each.append((one.shape, one.stride(), one.dtype))
        return cls(type(found), tuple(each))

    def again(self, mode: Fakes, given: Sequence[FakeTensor]) -> Any:
        """Returns it for another call of the same kind."""
        device = given[0].fake_device
        found = list[Any]()
        with torch._C._DisableTorchDispatch():
            for one in self.each:
                if type(one) is tuple:
                    size, stride, dtype = one
                    one = FakeTensor(mode, torch.empty_strided(size, stride, dtype=dtype, device="meta"), device)
                elif one is not None:
                    one = given[one]
                found.append(one)
        return found[0] if issubclass(self.kind, Tensor) else self.kind(found)


@contextmanager
def _checks_hold() -> Iterator[None]:
    """Takes for granted what is checked of tensors without values.

    transformers checks so whether there are as many places for images in a text as there are features of these.
    """
    check = torch._check_tensor_all_with

    def checked(error: type[Exception], condition: Tensor, message: Any = None) -> None:
        if not isinstance(condition, FakeTensor):
            check(error, condition, message)

    torch._check_tensor_all_with = checked
    try:
        yield
    finally:
        torch._check_tensor_all_with = check


@contextmanager
def one_sequence_each() -> Iterator[None]:
    """Has transformers find what it finds in training by the values of positions that it counts itself.

    That a sample is one sequence it cannot see without values, and would mask attention by them: with a mask, which the
    training has not, attention takes twice as long.
    """
    utils: Any = sys.modules.get("transformers.masking_utils")
    find = getattr(utils, "find_packed_sequence_indices", None)
    if find is None:
        yield
        return

    def found(position_ids: Tensor) -> Tensor | None:
        return None if isinstance(position_ids, FakeTensor) else find(position_ids)

    utils.find_packed_sequence_indices = found
    try:
        yield
    finally:
        utils.find_packed_sequence_indices = find


def _is_ordinary(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten" or _SPECIAL.intersection(func.tags):
        return False
    returns = [str(one.type) for one in func._schema.returns]
    tensors = all(kind in ("Tensor", "Optional[Tensor]", "List[Tensor]") for kind in returns)
    return bool(returns) and tensors and not any(name in func.name() for name in _SPECIAL_NAMES)


def _shares(one: Tensor, given: Sequence[Tensor]) -> bool:
    storage = one.untyped_storage()._cdata
    return any(other.untyped_storage()._cdata == storage for other in given)


def _described(found: Any, given: Sequence[Tensor]) -> list[Any]:
    """Returns what each of the tensors that were found is like, and which of those given it shares memory with."""
    described = list[Any]()
    for one in [found] if isinstance(found, Tensor) else found:
        if not isinstance(one, FakeTensor):
            described.append(one)
            continue
        shared = [_shares(one, [other]) for other in given]
        same = [other is one for other in given]
        described.append((one.shape, one.stride(), one.storage_offset(), one.dtype, one.fake_device, shared, same))
    return described
