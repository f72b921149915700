"""A ring for models of a few pages: of one as long as their layers, RAM that holds it holds them as well."""

from __future__ import annotations

import pytest

from stronghold.engine.budget import BUFFERS
from stronghold.store import ring

SLOT_BYTES = 8 * 4096
RING_BYTES = ring.SLOTS * SLOT_BYTES


def make_the_ring_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has chunks of ``SLOT_BYTES`` at most, for the store and for what is planned."""
    monkeypatch.setattr(ring, "SLOT_BYTES", SLOT_BYTES)
    monkeypatch.setitem(vars(BUFFERS), "ring_slot_bytes", SLOT_BYTES)
