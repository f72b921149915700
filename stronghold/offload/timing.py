"""Where a step's time went."""

from __future__ import annotations

from stronghold.device import Device
from stronghold.evaluation.report import StepTimes
from stronghold.window import Traffic


class Stopwatch:
    """Cuts the engine's traffic at each optimizer step, and adds it up when asked."""

    def __init__(self, device: Device, fetched: Traffic, gradients: Traffic) -> None:
        self._device = device
        self._fetched = fetched
        self._gradients = gradients
        self._begin = device.stamp()
        self._last: tuple[object, object, Traffic, int] | None = None
        self._known: StepTimes | None = None

    def lap(self) -> None:
        """Ends one step and begins the next; waits for nothing."""
        now = self._device.stamp()
        self._last = (self._begin, now, self._fetched.cut(), self._gradients.cut().gradient_bytes)
        self._begin, self._known = now, None

    def last(self) -> StepTimes | None:
        """Returns the times of the last step that was taken, or None before the first."""
        if self._last is not None and self._known is None:
            begin, end, traffic, gradient_bytes = self._last
            fetch_wait_s = sum(self._device.seconds(*pair) for pair in traffic.fetch_waits)
            update_wait_s = sum(self._device.seconds(*pair) for pair in traffic.update_waits)
            total_s = self._device.seconds(begin, end)
            self._known = StepTimes(
                total_s=total_s,
                compute_s=max(0.0, total_s - fetch_wait_s - update_wait_s),
                fetch_wait_s=fetch_wait_s,
                update_wait_s=update_wait_s,
                disk_wait_s=0.0,
                fetches=traffic.fetches,
                fetched_bytes=traffic.fetched_bytes,
                gradient_bytes=gradient_bytes,
            )
        return self._known
