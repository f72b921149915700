"""A process's share of a machine, and replicas' gradients: against the formulas of link_bytes, and steps by clocks."""

import math
import random
from dataclasses import replace

import pytest

from stronghold.planner.link_bytes import all_reduce_bytes, reduce_scatter_bytes
from stronghold.planner.machine_share import all_reduce_s, reduced, share_of
from stronghold.planner.step import step_time
from stronghold.planner.step_bound import step_bound
from tests.crossed import seeds
from tests.planner.test_step import exact, random_step_work

MESSAGES = {"message_s": 0.25, "bytes_per_s": 50.0}


def machine_of(seed):
    rates = {"disk_read_bytes_per_s": 300.0, "disk_write_bytes_per_s": 200.0, "host_add_ns": 5.0}
    return replace(random_step_work(seed, slowed={})[1], **rates)


def test_one_process_has_all_and_one_replica_adds_nothing():
    machine = machine_of(0)
    assert share_of(machine, 1, is_host=True) is machine
    assert reduced(machine, 1, **MESSAGES) is machine


@pytest.mark.parametrize("is_host", [False, True])
def test_processes_have_threads_and_disks_in_common_and_on_the_host_its_cores_and_copies_too(is_host):
    machine, of_device = machine_of(1), 3 if is_host else 1
    share = share_of(machine, 3, is_host=is_host)
    assert share.host_update_ns == 3 * machine.host_update_ns
    assert share.host_add_ns == 3 * machine.host_add_ns > 0
    assert share.device_update_ns == of_device * machine.device_update_ns
    assert share.h2d_bytes_per_s == machine.h2d_bytes_per_s / of_device
    assert (share.disk_read_bytes_per_s, share.disk_write_bytes_per_s) == (100.0, pytest.approx(200 / 3))
    assert share.d2h_bytes_per_s == machine.d2h_bytes_per_s / of_device
    assert share.copy_s == machine.copy_s


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("d2h", [80.0, math.inf])
def test_gradients_take_the_reduce_scatter_of_all_and_the_copy_of_a_share(replicas, d2h):
    machine = replace(machine_of(2), d2h_bytes_per_s=d2h)
    elements, bytes_each = 100, 4
    sent = reduce_scatter_bytes(elements, bytes_each, replicas)
    alone_s = (replicas - 1) * 0.25 + sent / 50 + machine.copy_s + elements * bytes_each / replicas / d2h
    assert reduced(machine, replicas, **MESSAGES).down_s(elements * bytes_each) == exact(alone_s)
    both_s = 2 * (replicas - 1) * 0.25 + all_reduce_bytes(elements, bytes_each, replicas) / 50
    assert all_reduce_s(elements * bytes_each, replicas, **MESSAGES) == exact(both_s)


def test_messages_that_were_not_measured_take_no_time():
    machine = replace(machine_of(3), d2h_bytes_per_s=math.inf)
    free = reduced(machine, 2, message_s=0.0, bytes_per_s=math.inf)
    assert free.down_s(10**9) == machine.copy_s


@pytest.mark.parametrize("seed", seeds(30, 12))
def test_a_step_counts_them_and_no_step_of_replicas_is_shorter_than_its_bound(seed):
    work, machine, settings, root = random_step_work(seed, slowed={})
    shared = reduced(machine, random.Random(seed).choice((2, 4)), **MESSAGES)
    step, slower = (step_time(work, one, settings, root) for one in (machine, shared))
    assert step_bound(work, shared, settings, root).step_s <= slower.step_s * (1 + 1e-9)
    down = sum(shared.down_s(layer.gradient_bytes) - machine.down_s(layer.gradient_bytes) for layer in work)
    if down > 0 and any(layer.elements for layer in work):
        assert slower.busy_s["gradients"] != step.busy_s["gradients"]
