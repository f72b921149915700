"""What operators take on a measured machine: matrix products and attention by their sizes, the rest by its bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

WITHOUT_MASK = " without a mask"
NEAREST = 4
"""Measured sizes between which a rate is interpolated."""


class Op(NamedTuple):
    """An operator as far as its time depends on it.

    ``kind`` is "matmul", with ``sizes`` (batch, m, n, k) of products of m x k by k x n; "attention" or "attention
    backward", with (batch, heads, queries, keys, head size), " without a mask" behind it where every query sees every
    key; "transcendental" and a name for functions that arithmetic may bound, such as "transcendental gelu backward"; or
    "other". ``moved_bytes`` is what it reads and writes. The operations of attention are those without a mask, ten in
    its backward pass for each four in the forward one; with a causal mask half of them are computed.

    ``parts`` is into how many a processor's threads share it, 0 for as many as they like. Attention's backward pass
    they share by heads of keys (``cpu_flash_attention_backward`` in PyTorch's FlashAttentionKernel.cpp).
    """

    kind: str
    dtype: str
    sizes: tuple[int, ...]
    flops: int
    moved_bytes: int
    parts: int = 0


class Rate(NamedTuple):
    """What was measured at these sizes, FLOP per second: (m, n, k), or as in an ``Op`` of attention."""

    sizes: tuple[float, ...]
    flop_per_s: float


@dataclass(frozen=True, kw_only=True)
class OpRates:
    """What a machine sustains: ``flop_per_s`` by the kind and dtype of operators, ``bytes_per_s`` likewise of others.

    Products of a type that has no rates take those of type "", where there are any.

    "other" operators that move no more than ``cache_bytes`` do so at the rate of "cached" ones. Each operator takes
    ``op_s`` at least; where the host computes itself (``is_host``), that is what a call takes, and comes on top. Rates
    are those with all its ``threads`` at work, which so many ``processes`` share that compute at the same time.
    """

    flop_per_s: Mapping[tuple[str, str], Sequence[Rate]]
    bytes_per_s: Mapping[tuple[str, str], float]
    cache_bytes: int = 0
    op_s: float = 0.0
    is_host: bool = False
    threads: int = 1
    processes: int = 1

    def seconds(self, ops: Mapping[Op, int]) -> float:
        """Returns what ``ops``, each so many times, take one after the other."""
        return sum(count * self._seconds(op) for op, count in ops.items())

    def _seconds(self, op: Op) -> float:
        kind = op.kind.removesuffix(WITHOUT_MASK)
        known = self._near.get((kind, op.dtype)) or self._near.get((kind, ""))
        works_s = self._moves_s(op) if known is None else op.flops / known.at(_shape(kind, op.sizes))
        if known is not None and kind != op.kind:
            works_s *= 2  # rates are those under a causal mask
        if self.is_host:
            works_s *= self.processes
            if op.parts:
                works_s *= imbalance(op.parts, max(1, self.threads // self.processes))
        return self.op_s + works_s if self.is_host else max(self.op_s, works_s)

    def _moves_s(self, op: Op) -> float:
        kind = "cached" if op.kind == "other" and op.moved_bytes <= self.cache_bytes else op.kind
        kinds = (kind, kind.partition(" ")[0], "other")
        rate = next((self.bytes_per_s[one, op.dtype] for one in kinds if (one, op.dtype) in self.bytes_per_s), None)
        return op.moved_bytes / (rate or min(self.bytes_per_s.values()))

    @cached_property
    def _near(self) -> dict[tuple[str, str], _Near]:
        return {
            (kind, dtype): _Near([Rate(_shape(kind, rate.sizes), rate.flop_per_s) for rate in rates])
            for (kind, dtype), rates in self.flop_per_s.items()
        }


def imbalance(parts: int, threads: int) -> float:
    """Returns how many times as long so many equal parts take as if all threads could be at work until the end."""
    return math.ceil(parts / threads) * threads / parts


def _shape(kind: str, sizes: tuple[float, ...]) -> tuple[float, ...]:
    """Returns the sizes that a rate depends on: of several products at once, those of one with all their rows.

    Of attention samples and heads are one number, for each head of each is computed by itself, and how many there are
    matters the least: half as much as the lengths and the head's size.
    """
    if kind == "matmul":
        *several, m, n, k = sizes
        return math.prod(several) * m, n, k
    if kind.startswith("attention"):
        batch, heads, *rest = sizes
        return math.sqrt(batch * heads), *rest
    return sizes


class _Near:
    """Rates between those that were measured, by the inverse square of the distance of the sizes' logarithms."""

    def __init__(self, rates: Sequence[Rate]) -> None:
        self._points = [([math.log2(max(1, size)) for size in rate.sizes], rate.flop_per_s) for rate in rates]
        self._known: dict[tuple[float, ...], float] = {}

    def at(self, sizes: tuple[float, ...]) -> float:
        if sizes not in self._known:
            self._known[sizes] = self._between([math.log2(max(1, size)) for size in sizes])
        return self._known[sizes]

    def _between(self, here: list[float]) -> float:
        near = sorted((math.dist(here, there), rate) for there, rate in self._points)[:NEAREST]
        if near[0][0] == 0:
            return near[0][1]
        weights = [distance**-2 for distance, _ in near]
        logs = (weight * math.log(rate) for weight, (_, rate) in zip(weights, near, strict=True))
        return math.exp(sum(logs) / sum(weights))
