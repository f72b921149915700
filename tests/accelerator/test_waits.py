"""Promise 2 where PyTorch itself is the device's: no race in any setting, and one reported without any of the waits.

The same settings as in tests/test_ordering.py. There a delay must hit a missing wait; here none is needed.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from contextlib import suppress

import pytest
import torch

from stronghold import native
from stronghold.device import Wait, Waits
from stronghold.errors import StrongholdError
from tests import test_ordering
from tests.gpu import SOFT, needs_device
from tests.test_ordering import SETTINGS, SHOWN, train, undelayed

pytestmark = [
    pytest.mark.gpu,
    needs_device,
    pytest.mark.skipif(SOFT is None, reason="reads the accelerator's clocks"),
    pytest.mark.usefixtures("root_on_the_host"),
]

ALONE = {name: setting for name, setting in SETTINGS.items() if "replicas" not in setting}
"""Replicas that are threads would meet in autograd's one thread for the device; others are processes."""

NO_RACE = {
    "SHARE_UPDATED": "is for replicas; tests/test_ordering.py takes it away",
    "ROOT_WRITTEN": "is for a copy into ordinary memory, which blocks on an accelerator",
    "ROOT_GRADIENT": "is for the squares' copy into ordinary memory",
}


@pytest.fixture(autouse=True)
def _pointers_are_noted(monkeypatch):
    """What is read by a pointer no operator tells of."""
    original = test_ordering.sum_of

    def noted(values: ctypes.Array) -> float:
        SOFT.touch(torch.frombuffer(values, dtype=torch.float32), write=False, by="a pointer")
        return original(values)

    monkeypatch.setattr(test_ordering, "sum_of", noted)


def run(name: str, *, errors: tuple[type[Exception], ...] = ()) -> tuple[list[float] | None, list[str]]:
    """Returns what is seen in a few steps, or None where one of the ``errors`` is raised, and the races."""
    from tests.accelerator.host import NotedOperators

    settings, seen = dict(ALONE[name]), None
    with tempfile.TemporaryDirectory() as directory:
        if settings.pop("disk", False):
            settings["store"] = directory
        with suppress(*errors), SOFT.checked() as races, NotedOperators():
            seen = train("soft", **settings)
    return seen, races


ALIKE = (
    "accumulation",
    "accumulation in bf16",
    "deferred in bf16",
    "disk, whole window",
    "disk, window of three",
    "resident in_backward",
    "resident root",
    "whole window",
    "window of one",
)
"""Settings of which each is in others, too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in ALIKE else ()) for name in ALONE]
)
def test_nothing_races_and_the_bits_are_the_hosts(name):
    seen, races = run(name)
    assert races == []
    if {"resident", "device_memory"} & ALONE[name].keys():  # whose updates are the device's own arithmetic
        return
    expected = undelayed(name)
    if "clip" in ALONE[name]:  # a norm is summed in another order where parameters are on two devices
        expected = pytest.approx(expected, rel=1e-5)
    if "norm" in ALONE[name]:  # the host's kernel sums squares otherwise than torch; a weight may be near zero
        expected = pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert seen == expected


@pytest.mark.parametrize(
    "name", ["deferred", "in_backward", "host", "disk", "inputs on disk", "disk, in_backward in bf16"]
)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_late_kernels_and_copies_change_nothing(name, seed):
    SOFT.late(0.3, 3000, seed)
    try:
        seen, races = run(name)
    finally:
        SOFT.late(0, 0)
    assert races == []
    assert seen == undelayed(name)


@pytest.mark.parametrize("wait", [wait for wait in Wait if wait.name not in NO_RACE], ids=lambda wait: wait.name)
def test_without_a_wait_a_race_is_reported(wait, monkeypatch):
    """Takes one reason for waiting away. Updates take a while: whoever sees that one is over has waited for it."""
    originals = {kind: getattr(Waits, kind) for kind in ("stream", "thread", "compute", "host")}

    def without(original):
        def waits(self, *args):
            *_, reason = args
            return None if reason is wait else original(self, *args)

        return waits

    update = native.adamw

    def slow(*args, **kwargs) -> None:
        time.sleep(0.02)
        update(*args, **kwargs)

    monkeypatch.setattr(native, "adamw", slow)
    for kind, original in originals.items():
        monkeypatch.setattr(Waits, kind, without(original))
    for name in sorted(ALONE, key=lambda name: name != FIRST.get(wait.name, SHOWN[wait.name][0])):
        # What is not there yet is noticed, too, and what is written when autograd has it.
        if run(name, errors=(StrongholdError, RuntimeError))[1]:
            return
    pytest.fail(f"no race was reported without {wait.name}: {wait.value}")


FIRST = {
    "BUFFER_FREE": "disk, each step twice",
    "UPDATE_WRITTEN_BACK": "disk, each step twice",
    "READ_AHEAD": "disk, each step twice",
    "UPDATE_DONE": "disk, each step twice",
    "INPUT_SLOT_FREE": "host",
    "INPUT_WRITTEN": "host",
    "INPUT_DOWN": "host",
    "INPUT_SLOT_READ": "host",
    "INPUT_UP": "host",
    "INPUT_STAGED": "inputs on disk",
    "INPUT_STAGING_FREE": "inputs on disk",
    "WEIGHTS_READ": "reading",
}
"""Where the lack of a wait is seen first, to be done sooner."""
