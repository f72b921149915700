"""What a layer returns for its micro-batches, and what it writes into its arguments, put together as one run's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from stronghold.engine.copying import ATOMS, Memo, attributes_of

_ABSENT = object()
_COMPARED = (*ATOMS, set, frozenset, range, slice)
"""What has no tensors in it, and is the same where it compares equal."""


class NotCutError(ValueError):
    """A layer cannot run over micro-batches, by what it is given, or by what it returns or writes."""


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape have the same values, of which some may be NaN; waits for the device."""
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def join(outputs: Sequence[Any], leaders: Sequence[Sequence[int]]) -> Any:
    """Puts the outputs of micro-batches together as one run's output; ``leaders`` are the shapes of their inputs."""
    return Joiner(leaders).join(outputs)


class Joiner:
    """Puts together what a layer gives for its micro-batches, whose inputs have the shapes ``leaders``.

    A tensor is put together whose first dimension is the micro-batch, or the micro-batch times the sequence. One that
    is the same for every micro-batch is taken once: the same object, or the same values, by ``equal``, in one that has
    no gradient or has one as first dimension (a position bias). Values are compared of no other tensors, for that waits
    for the device; a bias comes from the first layer, and goes to the others as an object.

    ``join`` and ``write_back`` raise NotCutError for all else, such as an auxiliary loss that the layer has already
    averaged over its samples, numbers that differ, or objects of an unknown kind.
    """

    def __init__(
        self,
        leaders: Sequence[Sequence[int]],
        memos: Sequence[Memo] = (),
        parts: dict[int, tuple[Tensor, Sequence[Tensor]]] | None = None,
        equal: Callable[[Tensor, Tensor], bool] = are_equal,
        own: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        """Takes the copies of containers among the arguments, of each micro-batch, and the tensors that were cut.

        ``own`` returns numbers that are the layer's own, such as the size of a kernel, and count no samples.
        """
        self._leaders, self._memos, self._parts, self._equal, self._own = leaders, memos, parts or {}, equal, own
        self._samples = [leader[0] for leader in leaders]
        self._originals = {id(copied): original for memo in memos for original, copied in memo.values()}
        self._joined: dict[tuple[int, ...], tuple[Sequence[Any], Any]] = {}
        self._what = "a layer's outputs"

    def join(self, outputs: Sequence[Any]) -> Any:
        """Returns what one run would have returned."""
        first = outputs[0]
        if isinstance(first, (int, float)) and not isinstance(first, bool):
            return self._number(outputs)
        if all(output is first for output in outputs):
            return first
        key = tuple(map(id, outputs))
        if key not in self._joined:
            originals = [self._originals.get(id(output), _ABSENT) for output in outputs]
            if originals[0] is not _ABSENT and all(original is originals[0] for original in originals):
                return originals[0]
            self._joined[key] = outputs, self._made(outputs)
        return self._joined[key][1]

    def write_back(self) -> None:
        """Writes into lists, dictionaries and objects among the arguments what the layer has written into copies."""
        changes = []
        for key, (original, _) in self._memos[0].items() if self._memos else ():
            copies = [memo[key][1] for memo in self._memos]
            before = original if isinstance(original, (set, list, deque)) else _named(original)
            if not all(self._is_as_before(number, before, copied) for number, copied in enumerate(copies)):
                self._what = f"what a layer writes into a {type(original).__name__} among its arguments"
                changes.append((original, self._contents(original, copies)))
        for original, contents in changes:
            _write(original, contents)

    def _made(self, outputs: Sequence[Any]) -> Any:
        first = outputs[0]
        if all(isinstance(output, Tensor) for output in outputs):
            return self._tensor(outputs)
        if any(type(output) is not type(first) for output in outputs):
            self._refuse(f"{', '.join(type(output).__name__ for output in outputs)} for its micro-batches")
        if isinstance(first, torch.Size) and first[:1] == torch.Size([self._samples[0]]):
            self._refuse(f"{first}, which may be of a micro-batch")
        if isinstance(first, tuple):
            items = self._items(outputs)
            return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
        if isinstance(first, (list, deque)):
            joined = copy(first)  # of its own class
            joined.clear()
            joined.extend(self._items(outputs))
            return joined
        if isinstance(first, dict):
            self._check_alike([output.keys() for output in outputs])
            found = copy(first)  # of its own class
            for key in first:
                found[key] = self.join([output[key] for output in outputs])
            return found
        if isinstance(first, _COMPARED):
            self._check_alike(outputs)
            return first
        return self._object(outputs)

    def _object(self, outputs: Sequence[Any]) -> Any:
        first = outputs[0]
        if is_dataclass(first) and not isinstance(first, type):
            parts = {f.name: self.join([getattr(output, f.name, None) for output in outputs]) for f in fields(first)}
            made = replace(first, **{f.name: parts[f.name] for f in fields(first) if f.init})
            for name in (f.name for f in fields(first) if not f.init):
                if isinstance(parts[name], (int, float)) and getattr(made, name, _ABSENT) != parts[name]:
                    self._refuse(f"the number {parts[name]} for each of its micro-batches, in {name}")
                object.__setattr__(made, name, parts[name])
            return made
        if type(first).__module__ == "builtins" or attributes_of(first) is None:
            self._refuse(f"another {type(first).__name__} for each micro-batch")
        named = [_named(output) for output in outputs]
        self._check_alike([found.keys() for found in named])
        made = first.__class__.__new__(first.__class__)
        for name in named[0]:
            object.__setattr__(made, name, self.join([found[name] for found in named]))
        return made

    def _items(self, outputs: Sequence[Any]) -> list[Any]:
        self._check_alike([len(output) for output in outputs])
        return [self.join(parts) for parts in zip(*outputs, strict=True)]

    def _tensor(self, outputs: Sequence[Tensor]) -> Tensor:
        first, leaders = outputs[0], self._leaders
        lengths = [output.shape[0] if output.ndim else 0 for output in outputs]
        if lengths == self._samples:
            if first.ndim == 1 and set(lengths) == {1}:
                self._refuse(
                    "one of shape (1,) for each sample: it may be of the sample or of all",
                    "pass a micro_batch of two samples or more, or offload without micro_batch",
                )
            return torch.cat(list(outputs))
        if first.ndim > 1 and all(n == shape[0] * shape[1] for n, shape in zip(lengths, leaders, strict=True)):
            return torch.cat(list(outputs))
        if (first.ndim > 1 and set(lengths) == {1}) or not any(output.requires_grad for output in outputs):
            kinds = {(output.shape, output.dtype) for output in outputs}
            if len(kinds) == 1 and all(output is first or self._equal(first, output) for output in outputs):
                return first
        self._refuse(
            f"one of shape {tuple(first.shape)} for an input of shape {tuple(leaders[0])}: its first dimension is not "
            "the batch, and it is not the same for every micro-batch"
        )

    def _number(self, numbers: Sequence[Any], before: Any = _ABSENT) -> Any:
        """Returns what all are; a number that was not there ``before`` may be that of the samples."""
        self._check_alike(numbers)
        first = numbers[0]
        may_count = type(first) is int and first > 1 and self._samples == [first] * len(self._samples)
        if before is _ABSENT and may_count and first not in self._own():
            self._refuse(f"the number {first}, which may be that of the samples of a micro-batch")
        return first

    def _is_as_before(self, number: int, before: Any, copied: Any) -> bool:
        """Whether the copy that the micro-batch of this number got holds what it did ``before``, by name of objects."""
        if isinstance(before, set):
            return bool(before == copied)
        if isinstance(before, (list, deque)):
            pairs = zip(before, copied, strict=False)
            return len(before) == len(copied) and all(self._is_same(number, *pair) for pair in pairs)
        now = _named(copied)
        if before.keys() != now.keys():
            return False
        return all(item is now[name] or self._is_same(number, item, now[name]) for name, item in before.items())

    def _is_same(self, number: int, item: Any, now: Any) -> bool:
        """Whether an item of a container is the one that the micro-batch of this number was given."""
        if now is item:
            return True
        if isinstance(item, Tensor):
            _, found = self._parts.get(id(item), (item, ()))
            return bool(found) and found[number] is now
        if id(item) in self._memos[number]:
            return self._memos[number][id(item)][1] is now
        if not isinstance(item, tuple) or type(now) is not type(item) or len(now) != len(item):
            return False
        return all(self._is_same(number, *pair) for pair in zip(item, now, strict=True))

    def _contents(self, original: Any, copies: Sequence[Any]) -> Any:
        if isinstance(original, set):
            self._check_alike(copies)
            return copies[0]
        if isinstance(original, (list, deque)):
            self._check_alike([len(copied) for copied in copies])
            before, now = dict(enumerate(original)), [dict(enumerate(copied)) for copied in copies]
        else:
            before, now = _named(original), [_named(copied) for copied in copies]
            self._check_alike([named.keys() for named in now])
        may_count = not isinstance(original, (list, deque, dict))
        return {
            name: self._item(before.get(name, _ABSENT), [named[name] for named in now], may_count) for name in now[0]
        }

    def _item(self, before: Any, now: Sequence[Any], may_count: bool) -> Any:
        if before is not _ABSENT and all(self._is_same(number, before, item) for number, item in enumerate(now)):
            return before
        if type(before) in (int, float) and type(now[0]) in (int, float):
            if not may_count:  # what counts calls, such as a cache, is an object
                self._refuse(f"the number {now[0]} in place of {before}: it may count samples")
            return self._number(now, before)
        return self.join(now)

    def _check_alike(self, values: Sequence[Any]) -> None:
        if any(
            value is not values[0] and (type(value) is not type(values[0]) or value != values[0]) for value in values
        ):
            self._refuse(f"{', '.join(map(str, values))} for its micro-batches")

    def _refuse(self, got: str, remedy: str = "offload without micro_batch") -> NoReturn:
        raise NotCutError(f"micro_batch must be able to put {self._what} together (got {got}); {remedy}")


def _named(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else attributes_of(value) or {}


def _write(original: Any, contents: Any) -> None:
    if isinstance(original, set):
        original.clear()
        original.update(contents)
    elif isinstance(original, (list, deque)):
        original.clear()
        original.extend(contents.values())
    else:
        before, is_dict = dict(_named(original)), isinstance(original, dict)
        for name in before.keys() - contents.keys():
            original.pop(name) if is_dict else object.__delattr__(original, name)
        for name in (name for name in contents if before.get(name, _ABSENT) is not contents[name]):
            if is_dict:
                original[name] = contents[name]
            else:
                object.__setattr__(original, name, contents[name])
