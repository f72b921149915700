"""The fp32 masters of a unit that computes in bf16: beside each weight the 16 bits that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stronghold.device import Buffer
from stronghold.split import join, split

_BLOCK = 64
"""Elements that share a mark."""
_MARKED_AT_ONCE = 1 << 20
_ODD = torch.arange(1, 2 * _BLOCK // 4, 2, dtype=torch.int64, device="cpu") * 0x9E3779B97F4A7C1


class Masters:
    """The remainders of a unit's weights, by index, and whether they still belong to their weights.

    A user who writes a weight writes its bf16 part, and the master takes that value: the remainder of what was written
    becomes zero, all others stay. A write that goes through the parameter is compared element by element. Where
    the user holds a tensor over the weight's memory and may write unseen, a mark for every 64 elements, taken before,
    tells the blocks that were written. A write that shows in the version alone clears the parameter's remainders.
    """

    def __init__(self) -> None:
        self.remainders: dict[int, Tensor] = {}
        self.buffers: list[Buffer] = []
        """What they lie in."""
        self._marks: dict[int, Tensor] = {}
        self._accounted: dict[int, int] = {}
        """The version of each parameter up to which its writes are reflected in the remainders."""

    def __bool__(self) -> bool:
        return bool(self.remainders)

    @property
    def marked(self) -> bool:
        """Whether the user may write a weight unseen."""
        return bool(self._marks)

    def place(self, index: int, remainder: Tensor, version: int) -> None:
        self.remainders[index] = remainder
        self._accounted[index] = version

    def attach(self, index: int, version: int) -> None:
        """Called with the version that a parameter begins with."""
        if index in self.remainders:
            self._accounted[index] = version

    def fill(self, index: int, weight: Tensor, values: Tensor) -> None:
        """Writes ``values`` (fp32) as the master of one parameter."""
        split(values, weight, self.remainders[index])

    def value(self, index: int, weight: Tensor) -> Tensor:
        """Returns a copy of the fp32 master of one parameter."""
        return join(weight, self.remainders[index])

    def mark_aliased(self, index: int, weight: Tensor) -> bool:
        """Called when the user gets a tensor over a weight's memory, before anything is written through it.

        Returns whether it has read the weight, to mark it.
        """
        if index not in self.remainders or index in self._marks:
            return False
        self._marks[index] = _marks(weight)
        return True

    def write(
        self, index: int, weight: Tensor, task: Callable[[], object], versions: Callable[[], list[int]]
    ) -> object:
        """Runs ``task``, which writes into one weight, and clears the remainders of the elements it changed."""
        if index in self._marks:
            self._clear_marked(index, weight)  # what was written unseen before: the marks below forget it
        before = weight.detach().clone()
        seen = versions()
        result = task()
        self._clear(index, before, weight)
        # Parameters that were views of one memory share a version: a write into one counts for all and changes no other
        for known, version in enumerate(versions()):
            if self._accounted.get(known) == seen[known]:
                self._accounted[known] = version
        if index in self._marks:
            self._marks[index] = _marks(weight)
        return result

    def replace(self, index: int, weight: Tensor, value: Tensor) -> None:
        """Takes over a whole weight that was written elsewhere (a root parameter's, on the device)."""
        if index in self.remainders:
            self._clear(index, value, weight)
        weight.copy_(value)

    def take_writes(self, weights: list[Tensor], versions: list[int], shared: Callable[[int], bool]) -> None:
        """Clears the remainders of what was written since this was last asked."""
        for index, remainder in self.remainders.items():
            if index in self._marks:
                self._clear_marked(index, weights[index])
                if not shared(index):
                    del self._marks[index]
            elif self._accounted[index] != versions[index]:
                remainder.zero_()
            self._accounted[index] = versions[index]

    def forget(self, indices: Sequence[int]) -> None:
        """Clears the remainders of weights that were written, it is not known where."""
        for index in indices:
            if index in self.remainders and index not in self._marks:
                self.remainders[index].zero_()

    def updated(self, weights: list[Tensor], shared: Callable[[int], bool]) -> None:
        """Called when an update has written the weights."""
        for index in list(self._marks):
            if shared(index):
                self._marks[index] = _marks(weights[index])
            else:
                del self._marks[index]

    def _clear_marked(self, index: int, weight: Tensor) -> None:
        """Clears the remainders of the blocks that were written since they were marked, and marks them anew."""
        now, remainder = _marks(weight), self.remainders[index]
        if len(written := torch.nonzero(now != self._marks[index]).flatten()):
            elements = (written[:, None] * _BLOCK + torch.arange(_BLOCK, device=written.device)).flatten()
            remainder.view(-1)[elements[elements < remainder.numel()]] = 0
        self._marks[index] = now

    def _clear(self, index: int, before: Tensor, after: Tensor) -> None:
        # Bit for bit: a NaN that stayed is no write, and neither is a zero of another sign the same.
        changed = before.view(torch.int16) != after.detach().view(torch.int16)
        self.remainders[index].masked_fill_(changed, 0)


def _marks(weight: Tensor) -> Tensor:
    """Returns one number for every 64 elements: a sum, weighted by odd numbers, of their bits as 64-bit words.

    A block with one changed word always has another mark; one with several, but for a chance of 2 ** -64.
    """
    flat = weight.detach().view(torch.int16).flatten()
    whole = flat.numel() // _BLOCK * _BLOCK
    odd = _ODD.to(flat.device)
    marks = [
        (part.view(torch.int64).view(-1, _BLOCK // 4) * odd).sum(1) for part in flat[:whole].split(_MARKED_AT_ONCE)
    ]
    if whole < flat.numel():
        rest = torch.zeros(_BLOCK, dtype=torch.int16, device=flat.device)
        rest[: flat.numel() - whole] = flat[whole:]
        marks.append((rest.view(torch.int64) * odd).sum(0, keepdim=True))
    return torch.cat(marks) if marks else torch.empty(0, dtype=torch.int64, device="cpu")
