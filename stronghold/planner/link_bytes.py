"""Bytes that a step moves over each link, and that a node's host holds: formulas, each with where it comes from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from stronghold.planner.pipeline_order import Pipeline


def boundary_bytes(pipeline: Pipeline, activation_bytes: int | Sequence[int]) -> dict[tuple[int, int], int]:
    """Returns what each link between two devices of a pipeline carries in a step: (sender, receiver) to bytes.

    ``activation_bytes`` is what one micro-batch hands from a stage to the next, one number or one for each of the
    stages - 1 boundaries: samples · sequence · hidden · bytes an element, for a GPT. Each of m micro-batches crosses
    each boundary once as an activation, and once back as that activation's gradient, which has its shape and dtype:

        m · a bytes from the device of stage s to that of stage s + 1, and m · a bytes back.

    Boundaries between the same devices add up: of v stages on each of p > 2 devices, device d hands on v · m · a, the
    last one (v - 1) · m · a, round to the first. Two stages on one device need no link. Raises ValueError where
    there are not as many numbers as boundaries.
    """
    boundaries = pipeline.stages - 1
    each = list(activation_bytes) if isinstance(activation_bytes, Sequence) else [activation_bytes] * boundaries
    if len(each) != boundaries:
        raise ValueError(
            f"activation_bytes must be one number, or one for each boundary between stages ({boundaries}; got "
            f"{len(each)}); pass as many"
        )
    carried: Counter[tuple[int, int]] = Counter()
    for stage, size in enumerate(each):
        ends = pipeline.device_of(stage), pipeline.device_of(stage + 1)
        if ends[0] != ends[1]:
            carried[ends] += pipeline.micro_batches * size
            carried[ends[::-1]] += pipeline.micro_batches * size
    return dict(carried)


def share(elements: int, replicas: int) -> int:
    """Returns the elements of a tensor that one of its replicas owns: ⌈n / N⌉, for collectives want equal shares."""
    return -(-elements // replicas)


def reduce_scatter_bytes(elements: int, element_bytes: int, replicas: int) -> int:
    """Returns what each of N replicas sends, and receives, so that each has the sum of its share of a gradient.

    Of the N shares that a replica has computed it keeps its own and must part with the other N - 1. A ring does it in
    N - 1 steps in which every replica passes on one partial sum of one share (Patarasuk and Yuan 2009), which is also
    the least, for the owner of a share must receive what the others add to it and the others must send it:

        (N - 1) · ⌈n / N⌉ · bytes an element = (N - 1) / N of the gradient, where N divides it.
    """
    return (replicas - 1) * share(elements, replicas) * element_bytes


def all_reduce_bytes(elements: int, element_bytes: int, replicas: int) -> int:
    """Returns what each of N replicas sends, and receives, so that each has the sum of the whole gradient.

    A reduce-scatter, and then a gather of the sums, which takes as much again (the same):

        2 · (N - 1) · ⌈n / N⌉ · bytes an element = 2 · (N - 1) / N of the gradient, where N divides it.
    """
    return 2 * reduce_scatter_bytes(elements, element_bytes, replicas)


def all_gather_bytes(elements: int, element_bytes: int, replicas: int) -> int:
    """Returns what each of N replicas receives, and sends in a ring, so that each has all weights of a layer.

    A replica has its own share and lacks the other N - 1; in each of a ring's N - 1 steps every replica passes on the
    share that it received last:

        (N - 1) · ⌈n / N⌉ · bytes an element = (N - 1) / N of the weights, where N divides them.
    """
    return (replicas - 1) * share(elements, replicas) * element_bytes


def fetches(layers: int, window: int, micro_batches: int) -> int:
    """Returns how many layers a stage fetches into its window in a step, at the least.

    The update changes every layer, so that the first of the 2m passes of m micro-batches (forward and backward)
    fetches all L. Any later pass goes over all L again and can find at most the w that the window held when it began:

        L + (2m - 1) · (L - w) for w ≤ L; 2L - w for one micro-batch.

    Where forward and backward passes alternate, as on the last stage under 1F1B, each pass finds exactly the w that
    the one before it ended with. With replicas each fetch gathers a layer once.
    """
    return layers + (2 * micro_batches - 1) * max(0, layers - window)


def host_bytes(parameters: Sequence[int], replicas: int, devices_per_node: int, bytes_a_parameter: float) -> list[int]:
    """Returns what each node's host holds of weights, states and gradients, rounded up to whole bytes.

    ``parameters`` are those of each device of the pipeline, ``bytes_a_parameter`` what one has on the host: 12 for a
    master, two moments and no gradient. Replicas share them: each of N has ⌈P / N⌉ of its stage's P parameters, and
    the device of pipeline position d and replica r is number d · N + r, so that the replicas of a stage are neighbours:

        Σ ⌈P_d / N⌉ · bytes per parameter over the node's devices,

    which is one set of a stage's states, not N, where a node has all of its replicas.
    """
    shares = [share(count, replicas) for count in parameters for _ in range(replicas)]
    nodes = [shares[first : first + devices_per_node] for first in range(0, len(shares), devices_per_node)]
    return [math.ceil(sum(node) * bytes_a_parameter) for node in nodes]
