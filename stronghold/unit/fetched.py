"""The newest fetch of a layer's weights: until it is complete the host must not write them."""

from __future__ import annotations

from stronghold.device import Event, Wait, Waits


class Fetched:
    """That fetch, until the host has waited for it: a device may be behind, with nothing else to wait for it.

    So it is behind an evaluation: weights that are written next would be in it.
    """

    def __init__(self) -> None:
        self.event: Event | None = None
        """Happens when the weights have arrived; None where the host has waited."""
        self.waits: Waits | None = None

    def begin(self, event: Event, waits: Waits) -> None:
        """Called when a fetch is given to the device, which is complete at ``event``."""
        self.event, self.waits = event, waits

    def use(self, *, held: bool) -> None:
        """Called when a computation takes the weights; the host waits where the user has ``held`` their memory."""
        if held:
            self.wait()

    def wait(self) -> None:
        """Waits until they have arrived: the user may write them."""
        if self.event is not None:
            assert self.waits is not None
            self.waits.host(self.event, Wait.WEIGHTS_FETCHED)
            self.event = None
