"""What the engine moves, counted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from stronghold.device import KEPT_WAITS


@dataclass
class Traffic:
    """What has crossed the link since the last step, and what was waited for."""

    fetches: int = 0
    fetched_bytes: int = 0
    spared: int = 0
    """Fetches that a forward pass did without, of layers that it passed over."""
    spared_bytes: int = 0
    gradient_bytes: int = 0
    reduced_bytes: int = 0
    """Of gradients, to this machine's other replicas."""
    crossed_bytes: int = 0
    """Of gradients, to replicas on other machines."""
    passes: int = 0
    """Backward passes that have ended."""
    fetch_waits: deque[tuple[object, object]] = field(default_factory=lambda: deque(maxlen=KEPT_WAITS))
    update_waits: deque[tuple[object, object]] = field(default_factory=lambda: deque(maxlen=KEPT_WAITS))
    disk_waits: deque[tuple[object, object]] = field(default_factory=lambda: deque(maxlen=KEPT_WAITS))

    def cut(self) -> Traffic:
        """Returns what has been counted and begins anew."""
        until_now = Traffic(**vars(self))
        vars(self).update(vars(Traffic()))
        return until_now
