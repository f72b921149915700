"""A ring for models of a few pages: of one as long as their layers, RAM that holds it holds them as well."""

from __future__ import annotations

import pytest

from stronghold.engine.budget import BUFFERS
from stronghold.store import ring

SLOT_BYTES = 8 * 4096
RING_BYTES = ring.SLOTS * SLOT_BYTES


def make_the_ring_small(monkeypatch: pytest.MonkeyPatch, slot_bytes: int = SLOT_BYTES) -> None:
    """Has chunks of ``slot_bytes`` at most, for the store and for what is planned."""
    monkeypatch.setattr(ring, "SLOT_BYTES", slot_bytes)
    monkeypatch.setitem(vars(BUFFERS), "ring_slot_bytes", slot_bytes)
