"""What the link between host and device sustains, each way and both at once, by the engine's own streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from torch import Tensor

from stronghold.device import Device, Stream
from stronghold.probing.rounds import Key, Measure

BUFFER_BYTES = 32 * 2**20
LEAST_S = 0.04
MOST_COPIES = 64
SMALL_COPIES = 64


class Link:
    """Copies between a buffer on the host and one on the device. Where these are one memory it is the copy of slots."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: dict[str, tuple[Tensor, Tensor]] = {}
        for way, pinned in (("h2d", True), ("d2h", True), ("h2d_pageable", False)):
            host = device.host_buffer(BUFFER_BYTES, pinned=pinned, private=True).flat
            there = device.buffer(BUFFER_BYTES)
            host.fill_(1)
            there.fill_(1)
            self._buffers[way] = (host, there) if way == "d2h" else (there, host)
        device.host_wait(device.record_event())  # the device's buffers are filled in the order of the computation
        self._counts: dict[str, int] = {}

    def measures(self) -> list[Measure]:
        return [Measure("the link", self._alone), Measure("the link both ways", self._both)]

    def _stream(self, way: str) -> Stream:
        return self._device.gradients if way == "d2h" else self._device.fetches

    def _issue(self, way: str, copies: int) -> Callable[[], float]:
        """Begins so many copies; returns what waits for their end and returns the seconds."""
        stream, (target, source) = self._stream(way), self._buffers[way]
        begin = stream.stamp()
        for _ in range(copies):
            stream.copy(target, source)
        end = stream.stamp()
        return lambda: self._device.seconds(begin.get(), end.get())

    def _copies(self, way: str) -> int:
        if way not in self._counts:
            self._issue(way, 1)()
            taken_s = self._issue(way, 2)() / 2
            self._counts[way] = max(2, min(MOST_COPIES, round(LEAST_S / max(taken_s, 1e-6))))
        return self._counts[way]

    def _alone(self) -> Mapping[Key, float]:
        found: dict[Key, float] = {}
        for way in self._buffers:
            copies = self._copies(way)
            found["link", way] = copies * BUFFER_BYTES / self._issue(way, copies)()
        return {**found, ("link", "copy_s"): self._small()}

    def _small(self) -> float:
        """Returns what a copy takes beside its bytes."""
        target, source = (one[:64] for one in self._buffers["h2d"])
        stream = self._device.fetches
        begin_s = time.perf_counter()
        for _ in range(SMALL_COPIES):
            stream.copy(target, source)
        stream.record().wait()
        return (time.perf_counter() - begin_s) / SMALL_COPIES

    def _both(self) -> Mapping[Key, float]:
        """Both ways at once: the way that ends first was beside the other all the time, the other one in part."""
        ways = ("h2d", "d2h")
        copies = max(self._copies(way) for way in ways)
        moved = copies * BUFFER_BYTES
        ends = [self._issue(way, copies) for way in ways]
        taken_s = {way: end() for way, end in zip(ways, ends, strict=True)}
        first, last = sorted(ways, key=taken_s.__getitem__)
        alone = copies * BUFFER_BYTES / self._issue(last, copies)()
        beside = moved - alone * (taken_s[last] - taken_s[first])
        found = {first: moved / taken_s[first], last: max(beside, 0.05 * moved) / taken_s[first]}
        return {("link", f"{way}_beside_{'d2h' if way == 'h2d' else 'h2d'}"): found[way] for way in ways}
