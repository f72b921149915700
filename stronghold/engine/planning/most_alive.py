"""When the most of a step's activations, and of gradients of them, is alive on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stronghold.engine.planning.computation import ModelComputation


def most_alive(of: ModelComputation, micro_batch: int | None, kept: int) -> int:
    """Returns the most bytes that are alive at once, root parameters' gradients with them.

    The last ``kept`` layers keep their activations, and the others are recomputed, over micro-batches of so many
    samples.
    """
    root, count = of.root, len(of.group_of)
    passes = [of.passes(n, micro_batch, kept=n >= count - kept) for n in range(count)]
    left = [one.saved_bytes if n in root.dropped else one.left_bytes for n, one in enumerate(passes)]
    most = held = 0  # what layers before have left
    for number, own in enumerate(passes):
        most = max(most, held + max(root.before_bytes[number], root.given_bytes[number] + own.forward_bytes))
        held += left[number]
    most = max(most, held + root.behind_bytes)
    for number, own in reversed([*enumerate(passes)]):
        held -= left[number]
        if number in root.live_bytes:
            within = root.live_bytes[number] + own.saved_bytes + own.backward_bytes
            most = max(most, held + max(within, root.after_bytes[number]))
    return most
