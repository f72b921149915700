"""Events: what one stream records and another waits for."""

from __future__ import annotations

import threading

from stronghold.device.forks import check_process, forks
from stronghold.errors import StrongholdError


class Event:
    """A point in a stream's work that others wait for.

    It happens once. Where the work before it failed, the event fails too and everyone who waits for it gets that
    error: an engine whose copy failed ends with the reason, never in a hang. In a child of fork nobody is left to have
    it happen, which is an error, too.
    """

    __slots__ = ("__weakref__", "_born", "_error", "_happened", "time")

    def __init__(self) -> None:
        self._born = forks()
        self._happened = threading.Event()
        self._error: BaseException | None = None
        self.time = 0.0
        """Seconds on the throttled device's clock; unused elsewhere."""

    def happen(self) -> None:
        self._happened.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._happened.set()

    @property
    def done(self) -> bool:
        """Whether waiting would return at once."""
        return self._happened.is_set()

    @property
    def passed(self) -> bool:
        """Whether it has happened, and nothing had failed."""
        return self.done and self._error is None

    def wait(self) -> None:
        """Blocks the calling thread until the event has happened; raises what made it fail."""
        if not self.done:
            check_process(self._born)
        if not self._happened.is_set():
            check_not_at_once()
            self._happened.wait()
        if isinstance(self._error, StrongholdError):
            raise self._error
        if (error := self._error) is not None:
            raise RuntimeError(f"a background copy or update failed: {str(error) or type(error).__name__}") from error


givers: set[int] = set()
"""The threads, by their numbers, that carry out a stream's work themselves, in which they wait for nothing."""


def check_not_at_once() -> None:
    """Raises StrongholdError where a signal's handler would wait for the very work that the signal has interrupted."""
    if threading.get_ident() in givers:
        raise StrongholdError(
            "a signal's handler cannot wait for the model in the middle of a copy (it came there, and reads a weight, "
            "saves or computes); set a flag in the handler, and save when step() has returned"
        )
