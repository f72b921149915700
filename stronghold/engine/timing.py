"""Where a step's time went."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import nn

from stronghold.device import KEPT_WAITS, Waits
from stronghold.native import DiskCounters
from stronghold.step_times import StepTimes
from stronghold.window import Traffic

_Stamps = deque[tuple[object, object]]
"""When something has begun and ended, by the device's clock."""


class Stopwatch:
    """Cuts the engine's traffic at each optimizer step, and adds it up when asked.

    From the end of a step, or of a backward pass, to the first layer of the next training pass the model is left alone:
    there a loader reads, a checkpoint is written, an evaluation runs. That time is told apart. Fetches that were waited
    for in it are not the step's; updates are, whoever was first to wait for them.
    """

    def __init__(self, waits: Waits, fetched: Traffic, gradients: Traffic, disk: Callable[[], DiskCounters]) -> None:
        self._device, self._waits = waits.device, waits
        self._fetched = fetched
        self._gradients = gradients
        self._disk = disk
        self._moved = disk()
        self._begin = waits.device.stamp()
        self._left: object | None = self._begin
        """Since when the model is left alone, None while it trains."""
        self._waited = Traffic()
        """What was waited for in this step until it was left alone the last time."""
        self._outside: _Stamps = deque(maxlen=KEPT_WAITS)
        self._waited_outside: _Stamps = deque(maxlen=KEPT_WAITS)
        """For updates, in that time."""
        self._last: tuple[object, object, Traffic, Traffic, DiskCounters, _Stamps, _Stamps] | None = None
        self._known: StepTimes | None = None

    def leave(self, *, more: bool) -> None:
        """Called at the end of a backward pass: the model is left alone, unless ``more`` of a pipeline follow."""
        if self._left is None and not more:
            self._keep_waits()
            self._left = self._device.stamp()

    def come_back(self, layer: nn.Module) -> None:
        """Called when a layer is about to compute; not in training where it has neither gradients nor that mode."""
        # Without gradients in a reentrant checkpoint's first run, with them where a model is fine-tuned in eval mode.
        if torch.is_grad_enabled() or layer.training:
            self.resume()

    def resume(self) -> None:
        """Called when the model trains again, if it was left alone."""
        if self._left is not None:
            for kept, waits in self._waits_by_kind():
                if kept is self._waited.update_waits:
                    kept += waits
                    self._waited_outside += waits
                waits.clear()
            self._outside.append((self._left, self._device.stamp()))
            self._left = None

    def lap(self) -> None:
        """Ends one step and begins the next; waits for nothing."""
        now, moved = self._device.stamp(), self._disk()
        disk = DiskCounters(
            read_bytes=moved.read_bytes - self._moved.read_bytes,
            written_bytes=moved.written_bytes - self._moved.written_bytes,
            busy_s=moved.busy_s - self._moved.busy_s,
        )
        self._keep_waits()
        fetched, gradients = self._fetched.cut(), self._gradients.cut()
        fetched.fetch_waits, fetched.update_waits = self._waited.fetch_waits, self._waited.update_waits
        fetched.disk_waits = self._waited.disk_waits
        self._last = (self._begin, now, fetched, gradients, disk, self._outside, self._waited_outside)
        self._waited, self._outside = Traffic(), deque(maxlen=KEPT_WAITS)
        self._waited_outside = deque(maxlen=KEPT_WAITS)
        self._begin = self._left = now
        self._moved, self._known = moved, None

    def last(self) -> StepTimes | None:
        """Returns the times of the last step that was taken, or None before the first."""
        if self._last is not None and self._known is None:
            begin, end, traffic, gradients, disk, outside, waited_outside = self._last
            fetch_wait_s = self._seconds(traffic.fetch_waits)
            update_wait_s = self._seconds(traffic.update_waits)
            disk_wait_s = self._seconds(traffic.disk_waits)
            outside_s = max(0.0, self._seconds(outside) - self._seconds(waited_outside))
            total_s = self._device.seconds(begin, end)
            self._known = StepTimes(
                total_s=total_s,
                compute_s=max(0.0, total_s - outside_s - fetch_wait_s - update_wait_s - disk_wait_s),
                fetch_wait_s=fetch_wait_s,
                update_wait_s=update_wait_s,
                disk_wait_s=disk_wait_s,
                outside_s=outside_s,
                fetches=traffic.fetches,
                fetched_bytes=traffic.fetched_bytes,
                gradient_bytes=gradients.gradient_bytes,
                reduced_bytes=gradients.reduced_bytes,
                crossed_bytes=gradients.crossed_bytes,
                disk_read_bytes=disk.read_bytes,
                disk_written_bytes=disk.written_bytes,
                disk_busy_s=disk.busy_s,
                spared_fetches=traffic.spared,
                spared_bytes=traffic.spared_bytes,
                passes=max(1, gradients.passes),
            )
        return self._known

    def _seconds(self, stamps: _Stamps) -> float:
        return sum(self._device.seconds(*pair) for pair in stamps)

    def _keep_waits(self) -> None:
        for kept, waits in self._waits_by_kind():
            kept += waits
            waits.clear()

    def _waits_by_kind(self) -> Iterator[tuple[_Stamps, _Stamps]]:
        """Yields what was waited for until now, as kept for the step and as it comes, by kind and place."""
        for traffic in (self._fetched, self._gradients):
            yield self._waited.fetch_waits, traffic.fetch_waits
            yield self._waited.update_waits, traffic.update_waits
            yield self._waited.disk_waits, traffic.disk_waits
        yield self._waited.update_waits, self._waits.for_updates
