"""The directions of matrices that a machine's replicas have in common: each writes a share, and iterates some."""

from __future__ import annotations

from collections.abc import Sequence

from stronghold.optim.muon_step import Direction
from stronghold.unit import Replicas


class DirectionsInCommon:
    """The directions of one unit's update in memory that all of a machine's ``replicas`` have.

    Each replica writes what its own share of the momentum says. When all have, each iterates every n-th matrix, as a
    whole, and when all have again, each moves its own share of the weights. The three meetings are in the thread that
    updates; all replicas update the same units in the same order.
    """

    def __init__(self, directions: Sequence[Direction], replicas: Replicas) -> None:
        self._own = directions[replicas.local_rank :: replicas.local_world_size]
        self._lane = replicas.updates
        self._is_taken = False
        for direction in directions:
            direction.in_common = self

    def take(self) -> None:
        """Blocks until every replica's share is there and all directions are orthogonal.

        Called by each replica before the first share of a weight moves; a later call of the same update returns at
        once.
        """
        if self._is_taken:
            return
        self._is_taken = True
        self._lane.barrier()  # a share that is missing would be an older direction's
        for direction in self._own:
            direction.iterate()
        for direction in self._own:
            direction.wait_iterated()
        self._lane.barrier()

    def end(self) -> None:
        """Blocks until no replica reads the directions any more: the next unit's go into the same memory.

        Called by each replica, also by one whose share of every matrix is empty.
        """
        self.take()
        self._lane.barrier()
