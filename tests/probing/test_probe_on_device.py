"""The probe of a device with memory of its own: a GPU where there is one, or the accelerator in software."""

import gc
import time

import pytest
import torch

import stronghold
from stronghold.device import open_device
from stronghold.planner.machine_rates import machine_of
from stronghold.probing import stopwatches
from stronghold.probing.probe import glance
from stronghold.probing.stopwatches import DeviceClock
from tests.gpu import DEVICE, SOFT, needs_device
from tests.probing.small import make_short

pytestmark = [pytest.mark.gpu, needs_device]


def test_a_device_is_measured_by_its_own_clock(monkeypatch, tmp_path):
    make_short(monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    machine = stronghold.probe(seconds=1)
    assert (machine.device, machine.is_host, machine.runs_behind) == (DEVICE, False, True)
    assert 2**30 <= machine.device_memory_bytes < 2**45
    assert machine.device_name
    assert machine.cores >= 1
    formats = {f"{dtype}+{states}" for dtype in ("float32", "bfloat16") for states in ("fp32", "8bit", "muon")}
    assert set(machine.device_update_ns) == set(machine.host_update_ns) == formats
    assert all(spread.low > 0 for spread in machine.device_update_ns.values())
    assert 0 < machine.op_s.likely < machine.launch_s.likely * 100
    rates = machine_of(machine, dtype="bfloat16", states="fp32", layer_ops=10)
    assert rates.launch_s == 10 * machine.launch_s.likely
    assert rates.d2h_bytes_per_s == machine.link["d2h"].likely
    assert stronghold.probing.kept_machine(DEVICE) == machine


def test_what_takes_long_to_issue_is_timed_by_what_it_takes_of_the_device(monkeypatch):
    monkeypatch.setattr(stopwatches, "BUSY_SIZE", 512 if DEVICE == "soft" else stopwatches.BUSY_SIZE)
    clock, values = DeviceClock(open_device(torch.device(DEVICE))), torch.zeros(8, device=DEVICE)

    def task():
        time.sleep(0.004)
        values.add_(1)

    # The least of three: a GPU that other processes use as well gives each of them some milliseconds in turn.
    assert min(clock.timed(task, calls=4) for _ in range(3)) < 0.002
    assert values.tolist() == [15.0] * 8


def test_what_a_glance_measured_with_is_gone_when_the_device_is_asked_what_is_free(monkeypatch):
    make_short(monkeypatch)
    device, dtypes = open_device(torch.device(DEVICE)), (torch.float32, torch.bfloat16)
    if SOFT is None:
        glance(device, dtypes=dtypes)  # workspaces of libraries stay
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    allocated_bytes, reserved_bytes = torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()
    free_bytes = device.free_bytes()
    emptied, empty_cache = [], torch.accelerator.empty_cache

    def noted():
        emptied.append((torch.accelerator.memory_allocated(), device.peak_bytes()))
        empty_cache()

    monkeypatch.setattr(torch.accelerator, "empty_cache", noted)
    glance(device, dtypes=dtypes)
    ((at_emptying, highest_bytes),) = emptied
    assert at_emptying == allocated_bytes
    assert torch.accelerator.memory_reserved() == reserved_bytes
    if SOFT is not None:  # of a GPU other processes take, too
        assert device.free_bytes() == free_bytes
    assert device.peak_bytes() == allocated_bytes < highest_bytes - 2**20
