"""What layers' inputs take that wait beside the device for the backward pass, before anything is placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stronghold.layout import ALIGNMENT_BYTES, PAGE_BYTES, lay_out, round_up
from stronghold.store import INPUT_STAGING
from stronghold.window import INPUT_SLOTS

if TYPE_CHECKING:
    from stronghold.engine.planning.computation import ModelComputation

OFF_DEVICE = ("host", "disk")
"""The ``activations`` that keep layers' inputs off the device."""


@dataclass(frozen=True, kw_only=True)
class KeptInputs:
    """Bytes by place: ``host`` of their buffers or of staging, ``disk`` of the file, ``device`` of slots on the way."""

    host: int = 0
    disk: int = 0
    device: int = 0


class InputsOfLayers:
    """Answers for a model, under ``activations`` as ``offload`` has them, whose device gives whole blocks."""

    def __init__(self, computation: ModelComputation, activations: str, block_bytes: int = 1) -> None:
        self.off_device = activations in OFF_DEVICE
        self._computation, self._activations, self._block_bytes = computation, activations, block_bytes
        self._runs: dict[int | None, list[list[list[int]]]] = {}
        self._taken: dict[int | None, KeptInputs] = {}

    def taken(self, micro_batch: int | None) -> KeptInputs:
        """Returns what they take in a step: nothing on the device, where they stay there."""
        if micro_batch not in self._taken:
            self._taken[micro_batch] = kept_inputs(self._of(micro_batch), self._activations, self._block_bytes)
        return self._taken[micro_batch]

    def sent(self, micro_batch: int | None, layer: int) -> int:
        """Returns the bytes of a layer's inputs that leave the device in a step, and come back."""
        return sum(map(sum, self._of(micro_batch)[layer])) if self.off_device else 0

    def _of(self, micro_batch: int | None) -> list[list[list[int]]]:
        if micro_batch not in self._runs:
            self._runs[micro_batch] = self._computation.runs(micro_batch) if self.off_device else []
        return self._runs[micro_batch]


def kept_inputs(layers: Sequence[Sequence[Sequence[int]]], activations: str, block_bytes: int = 1) -> KeptInputs:
    """Returns what inputs take in ``activations="host"`` or ``"disk"``, and nothing in others.

    ``layers`` have the bytes of each input in each of their runs in a step: of those that get gradients. The device
    gives whole blocks.
    """
    runs = [sizes for layer in layers for sizes in layer if sizes]
    if activations not in OFF_DEVICE or not runs:
        return KeptInputs()
    on_disk = activations == "disk"
    lengths = [lay_out(sizes, PAGE_BYTES if on_disk else ALIGNMENT_BYTES).total_bytes for sizes in runs]
    longest = max(max(sizes) for sizes in runs), max(lengths)  # an input on its way down, a run's on its way up
    device = INPUT_SLOTS * sum(round_up(length, block_bytes) for length in longest)
    if not on_disk:
        return KeptInputs(host=sum(lengths), device=device)
    pages = [round_up(length, PAGE_BYTES) for length in lengths]
    return KeptInputs(host=min(INPUT_STAGING, len(pages)) * max(pages), disk=sum(pages), device=device)
