"""Which process this is: a child of fork has neither the threads of its parent's streams nor memory of its own."""

from __future__ import annotations

import os

from stronghold.errors import OffloadedModelError

_forks = 0


def _count() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count)


def forks() -> int:
    """Returns how many forks led to this process since it was imported: what tells a child from its parent."""
    return _forks


def check_process(born: int) -> None:
    """Raises OffloadedModelError in a child of the process in which :func:`forks` was ``born``."""
    if born != _forks:
        raise OffloadedModelError(
            f"an offloaded model computes and is trained in the process that offloaded it (got process {os.getpid()}, "
            "forked from that: the threads that copy and update stayed there, and the weights are its memory); offload "
            "a model in the child, or let the child look only, with optimizer.wait() before the fork"
        )
