"""What layers' inputs take that wait beside the device for the backward pass, before anything is placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stronghold.layout import ALIGNMENT_BYTES, PAGE_BYTES, lay_out, round_up
from stronghold.store import INPUT_STAGING
from stronghold.window import INPUT_SLOTS


@dataclass(frozen=True, kw_only=True)
class KeptInputs:
    """Bytes by place: ``host`` of their buffers or of staging, ``disk`` of the file, ``device`` of slots on the way."""

    host: int = 0
    disk: int = 0
    device: int = 0


def kept_inputs(runs: Sequence[Sequence[int]], activations: str, block_bytes: int = 1) -> KeptInputs:
    """Returns what inputs take in ``activations="host"`` or ``"disk"``, and nothing in others.

    ``runs`` are the bytes of each input of every run of a layer in a step: of those that get gradients. The device
    gives whole blocks.
    """
    runs = [sizes for sizes in runs if sizes]
    if activations not in ("host", "disk") or not runs:
        return KeptInputs()
    on_disk = activations == "disk"
    lengths = [lay_out(sizes, PAGE_BYTES if on_disk else ALIGNMENT_BYTES).total_bytes for sizes in runs]
    longest = max(max(sizes) for sizes in runs), max(lengths)  # an input on its way down, a run's on its way up
    device = INPUT_SLOTS * sum(round_up(length, block_bytes) for length in longest)
    if not on_disk:
        return KeptInputs(host=sum(lengths), device=device)
    pages = [round_up(length, PAGE_BYTES) for length in lengths]
    return KeptInputs(host=min(INPUT_STAGING, len(pages)) * max(pages), disk=sum(pages), device=device)
