"""How a process that works is told from one that hangs."""

from __future__ import annotations

import os

import psutil
import pytest

from stronghold.distributed import activity
from stronghold.distributed.activity import Others, Spent, has_worked, identity, known_process, spent


@pytest.mark.parametrize("runs", [True, False])
def test_a_process_that_waits_for_a_processor_works(monkeypatch, runs):
    """A machine that is overloaded, or stood still itself, lets it compute nothing for a while."""
    monkeypatch.setattr(activity, "spent", lambda process: Spent(1.0, runs=runs))
    others, known = Others(5.0), repr(identity(psutil.Process()))
    assert others.works(known, 0.0)
    assert others.works(known, 60.0) is runs


@pytest.mark.parametrize(
    ("now", "works"), [(Spent(1.9, 7.0), False), (Spent(2.1, 7.0), True), (Spent(1.0, 8.0), True), (Spent(1.0), True)]
)
def test_more_than_a_tenth_of_a_core_is_work_and_so_is_what_is_read(now, works):
    assert has_worked(Spent(1.0, 7.0), now, 10.0) is works


def test_another_process_with_the_same_number_is_not_the_one_that_was_known():
    number, begun = identity(psutil.Process())
    known = known_process(repr((number, begun)))
    assert known is not None and known.pid == os.getpid() and spent(known).runs  # it is this one, which asks
    assert known_process(repr((number, begun + 1.0))) is None
    assert known_process(None) is None
