"""A task beside a layer's computation: how long each takes is by the clock, of tasks that ended beside it."""

import threading
import time

import pytest
import torch

from stronghold.device import open_device
from stronghold.errors import DiskError
from stronghold.probing import beside
from stronghold.probing.beside import SmallLayer
from stronghold.probing.stopwatches import DeviceClock

CALL_S, TASK_S = 0.002, 0.02


@pytest.fixture
def layer(monkeypatch):
    monkeypatch.setattr(beside, "HOST_LAYER", (4, 8))
    layer = SmallLayer(torch.float32, DeviceClock(open_device("cpu")))
    monkeypatch.setattr(layer, "compute", lambda: time.sleep(CALL_S))
    return layer


@pytest.mark.parametrize(("least_s", "least"), [(0.1, 1), (0.0, 3)])
def test_what_goes_on_beside_a_layer_is_timed_with_it(layer, least_s, least):
    threads = []

    def task():
        threads.append(threading.current_thread())
        time.sleep(TASK_S)

    begin_s = time.perf_counter()
    layer_s, task_s = layer.timed_beside(task, least_s, least=least)
    assert time.perf_counter() - begin_s >= max(least_s, least * TASK_S)
    assert len(threads) > least  # one more had begun
    assert set(threads) == {threads[0]} != {threading.main_thread()}
    assert not threads[0].is_alive()
    assert layer_s >= CALL_S
    assert task_s >= TASK_S


def test_what_ends_behind_the_layer_does_not_count(layer):
    """It had the machine to itself in part."""
    calls = []

    def task():
        calls.append(None)
        time.sleep(TASK_S if len(calls) == 1 else 10 * TASK_S)

    _, task_s = layer.timed_beside(task, 2 * TASK_S)
    assert len(calls) == 2
    assert TASK_S <= task_s < 5 * TASK_S


@pytest.mark.parametrize("so_many", [1, 2])
def test_a_task_that_fails_says_why(layer, so_many):
    """As transfers to a disk that is full meanwhile."""
    calls = []

    def task():
        calls.append(None)
        if len(calls) == so_many:
            raise DiskError("No space left on device")

    with pytest.raises(DiskError, match="No space left"):
        layer.timed_beside(task, 0.01, least=5)
