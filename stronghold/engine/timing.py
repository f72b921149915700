"""Where a step's time went."""

from __future__ import annotations

from collections.abc import Callable

from stronghold.device import Waits
from stronghold.native import DiskCounters
from stronghold.reports import StepTimes
from stronghold.window import Traffic


class Stopwatch:
    """Cuts the engine's traffic at each optimizer step, and adds it up when asked."""

    def __init__(self, waits: Waits, fetched: Traffic, gradients: Traffic, disk: Callable[[], DiskCounters]) -> None:
        self._device, self._waits = waits.device, waits
        self._fetched = fetched
        self._gradients = gradients
        self._disk = disk
        self._moved = disk()
        self._begin = waits.device.stamp()
        self._last: tuple[object, object, Traffic, Traffic, DiskCounters] | None = None
        self._known: StepTimes | None = None

    def lap(self) -> None:
        """Ends one step and begins the next; waits for nothing."""
        now, moved = self._device.stamp(), self._disk()
        disk = DiskCounters(
            read_bytes=moved.read_bytes - self._moved.read_bytes,
            written_bytes=moved.written_bytes - self._moved.written_bytes,
            busy_s=moved.busy_s - self._moved.busy_s,
        )
        fetched, gradients = self._fetched.cut(), self._gradients.cut()
        fetched.update_waits += gradients.update_waits
        fetched.update_waits += self._waits.for_updates
        self._waits.for_updates.clear()
        self._last = (self._begin, now, fetched, gradients, disk)
        self._begin, self._moved, self._known = now, moved, None

    def last(self) -> StepTimes | None:
        """Returns the times of the last step that was taken, or None before the first."""
        if self._last is not None and self._known is None:
            begin, end, traffic, gradients, disk = self._last
            fetch_wait_s = sum(self._device.seconds(*pair) for pair in traffic.fetch_waits)
            update_wait_s = sum(self._device.seconds(*pair) for pair in traffic.update_waits)
            disk_wait_s = sum(self._device.seconds(*pair) for pair in traffic.disk_waits)
            total_s = self._device.seconds(begin, end)
            self._known = StepTimes(
                total_s=total_s,
                compute_s=max(0.0, total_s - fetch_wait_s - update_wait_s - disk_wait_s),
                fetch_wait_s=fetch_wait_s,
                update_wait_s=update_wait_s,
                disk_wait_s=disk_wait_s,
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
