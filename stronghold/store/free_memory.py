"""Whether the host's memory can hold what is about to be allocated."""

from __future__ import annotations

import warnings

from stronghold import native
from stronghold.device import available_host_bytes
from stronghold.units import format_bytes

REMEDIES = "use states='8bit' or update='in_backward', freeze parameters, or train a smaller model"


class HostMemory:
    """Refuses what can never fit. What does not fit just now is told of, once.

    What is free at a moment says little where memory grows with its use (virtual machines), and where other programs'
    caches give way.
    """

    def __init__(self) -> None:
        self._warned = False

    def check(self, needed_bytes: int, held_bytes: int, what: str, remedies: str = REMEDIES) -> None:
        """Raises MemoryError where ``needed_bytes`` can never be had beside the ``held_bytes`` of this model."""
        needed, held = format_bytes(needed_bytes), format_bytes(held_bytes)
        if needed_bytes > (most := native.most_host_bytes(held_bytes)):
            raise MemoryError(
                f"{what} takes {needed} of host memory beside {held} that are held already, and the machine, its "
                f"container (cgroup) or the process's limit (ulimit -v) leaves {format_bytes(most)}; {remedies}"
            )
        if needed_bytes > (available := available_host_bytes()) and not self._warned:
            self._warned = True
            warnings.warn(
                f"{what} takes {needed} of host memory, and the system has {format_bytes(available)} available now: "
                "unless it gets more, or other programs give some back, the system may swap or end this process. "
                f"Close what else takes memory, or {remedies}",
                RuntimeWarning,
                stacklevel=8,
            )
