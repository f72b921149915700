"""Buffers that no ``state_dict()`` has, such as RoPE's frequencies: whether a checkpoint's are those of a model.

Training may change them, and a checkpoint has what they were then. What was computed of another configuration is the
model's own, as it is with ``load_state_dict``; the two are told apart by the checksums of how they were built.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from stronghold.formats.manifest import BufferEntry
from stronghold.formats.weight_files import some
from stronghold.native import crc32c


class BuiltBuffers:
    """Of each buffer of ``model`` that ``state_dict()`` has not, the CRC-32C of its bytes as it is now, once built."""

    def __init__(self, model: nn.Module) -> None:
        self._sums: WeakKeyDictionary[nn.Module, dict[str, int | None]] = WeakKeyDictionary()
        self.add(model)

    def add(self, model: nn.Module) -> None:
        """Notes those that have come to ``model`` since."""
        for module in model.modules():
            for name in module._non_persistent_buffers_set:
                buffer, known = module._buffers.get(name), self._sums.setdefault(module, {})
                if buffer is not None and name not in known:
                    known[name] = _sum(buffer)

    def of(self, module: nn.Module, name: str) -> int | None:
        """Returns the checksum of a buffer as it was built; None where it is not known, or ``state_dict()`` has it."""
        return self._sums.get(module, {}).get(name)

    def takes(self, module: nn.Module, own: str, name: str, entry: BufferEntry, saved: Tensor) -> bool | None:
        """Whether the buffer ``own`` of ``module`` is to become what a checkpoint has ``saved`` of ``name``.

        Not where it was computed otherwise there, beyond rounding, and training changed neither; None where values
        differ, and it is to be told: it is not known how they were built, or what was built otherwise was changed.
        """
        present, built = module._buffers[own], self.of(module, own)
        if entry.persistent or present is None or _same(present, saved):
            return True
        if entry.built is None or built is None:
            return None
        if entry.built == built:
            return True
        if _sum(present) != built or _sum(saved) != entry.built:
            return None
        if _close(present, saved):  # the same, computed by another processor
            self._sums[module][own] = entry.built
            return True
        return False


def tell_of(own: list[str], unknown: list[str], directory: Path) -> None:
    """Warns of buffers that stay the model's ``own``, and of those that the checkpoint replaces and may not have to."""
    for names, happens in (
        (own, "stay as this model computes them, as with load_state_dict"),
        (unknown, "become the checkpoint's, for training has changed them, or may have"),
    ):
        if names:
            warnings.warn(
                f"buffers that no state_dict() has are of another configuration than in the checkpoint, or random, and "
                f"{happens} (got {some(names)}, in {directory}); to go on with the same losses build the model as it "
                "was saved, with the same seed",
                RuntimeWarning,
                stacklevel=2,
            )


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and (c := _sum(one)) is not None and c == _sum(other)


def _close(one: Tensor, other: Tensor) -> bool:
    alike = one.dtype == other.dtype and one.shape == other.shape and one.dtype.is_floating_point
    return alike and torch.allclose(one.detach().cpu().double(), other.cpu().double(), rtol=1e-5, atol=1e-6)


def _sum(buffer: Tensor) -> int | None:
    if buffer.is_meta or buffer.layout != torch.strided or type(buffer) not in (Tensor, nn.Parameter):
        return None
    plain = buffer.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return crc32c(plain.view(-1).view(torch.uint8))
