"""From what a machine was measured to do to rates: functions, masks, and disks beside computing, by hand."""

from math import isclose

import pytest

from stronghold.planner.machine_file import Attention, Spread
from stronghold.planner.machine_rates import machine_of, op_rates
from stronghold.planner.machine_share import share_of
from stronghold.planner.op_costs import Op
from stronghold.planner.step_costs import Resource, UnitWork
from tests.planner.machines import about, laptop
from tests.planner.machines import machine as gpu

DISK = {"read": about(2e9), "write": about(4e9), "read_beside_write": about(1e9), "write_beside_read": about(1e9)}


def test_what_adamw_updates_beside_muon_takes_adamw_s_time():
    """An embedding, say, beside layers whose matrices are Muon's."""
    ns = {"float32+fp32": {"alone": about(0.5), "beside_compute": about(1.0)}}
    with_muon = {**ns, "float32+muon": {"alone": about(2.0), "beside_compute": about(2.0)}}
    on_device = {"float32+fp32": about(0.01), "float32+muon": about(0.3)}
    found = machine_of(
        gpu(host_update_ns=with_muon, device_update_ns=on_device), dtype="float32", states="muon", directories=[]
    )
    plain, matrices = UnitWork(elements=10**9), UnitWork(elements=10**9, matrices=2)
    assert (found.update_s(plain), found.on_device_s(plain)) == (pytest.approx(0.5), pytest.approx(0.01))
    assert (found.update_s(matrices), found.on_device_s(matrices)) == (pytest.approx(2.0), pytest.approx(0.3))
    older = machine_of(gpu(host_update_ns=ns, device_update_ns=on_device), dtype="float32", states="muon")
    assert (older.update_s(matrices), older.on_device_s(matrices)) == (pytest.approx(0.5), pytest.approx(0.01))
    shared = share_of(found, 4, is_host=True)
    assert (shared.update_s(matrices), shared.on_device_s(matrices)) == (pytest.approx(8.0), pytest.approx(1.2))


def test_a_function_has_the_rate_of_its_own_or_that_of_all():
    machine = laptop(
        transcendental={"float32": about(5e9), "float32 gelu": about(1e9), "float32 gelu backward": about(2e9)},
        op_s=Spread(0.0, 0.0, 0.0),
    )
    rates = op_rates(machine)
    for kind, taken_s in (
        ("transcendental gelu", 10.0),
        ("transcendental gelu backward", 5.0),
        ("transcendental softmax", 2.0),
    ):
        assert isclose(rates.seconds({Op(kind, "float32", (), 0, 10**10): 1}), taken_s)


def test_attention_without_a_mask_takes_twice_as_long():
    rates = op_rates(laptop(op_s=Spread(0.0, 0.0, 0.0)))
    sizes = (4, 8, 512, 512, 64)
    for kind, taken_s in (("attention", 1.0), ("attention without a mask", 2.0)):
        assert isclose(rates.seconds({Op(kind, "float32", sizes, int(8e10), 1): 1}), taken_s)
    assert isclose(rates.seconds({Op("attention backward without a mask", "float32", sizes, int(6e10), 1): 1}), 2.0)


@pytest.mark.parametrize(("parts", "times"), [(32, 1.0), (3, 4 / 3), (1, 2.0), (0, 1.0)])
def test_a_processor_s_cores_share_attention_s_backward_pass_by_its_parts(parts, times):
    """With two cores, of which one has nothing to do while the other has one more."""
    op = Op("attention backward", "float32", (4, 8, 512, 512, 64), int(6e10), 1, parts)
    for is_host in (True, False):
        rates = op_rates(laptop(is_host=is_host, cores=2, op_s=Spread(0.0, 0.0, 0.0)))
        assert isclose(rates.seconds({op: 1}), times if is_host else 1.0)


def test_processes_share_what_operators_compute_and_not_what_calling_them_takes():
    """Each has half of the four threads, for which its two parts are enough."""
    op = Op("attention backward", "float32", (4, 8, 512, 512, 64), int(6e10), 1, 2)
    of = {"cores": 8, "threads": 4, "op_s": Spread(0.5, 0.5, 0.5)}
    machine, device = laptop(**of), laptop(is_host=False, **of)
    assert isclose(op_rates(machine).seconds({op: 1}), 0.5 + 2.0)
    assert isclose(op_rates(machine, processes=2).seconds({op: 1}), 0.5 + 2.0)
    assert isclose(op_rates(machine, processes=4).seconds({op: 1}), 0.5 + 4.0)
    assert isclose(op_rates(device, processes=4).seconds({op: 1}), 1.0)


def test_so_they_do_what_was_measured():
    measured = Attention("float32", (1, 3, 512, 512, 64), about(8e10), about(6e10))
    rates = op_rates(laptop(attention=[measured], cores=2, op_s=Spread(0.0, 0.0, 0.0)))
    ops = [Op("attention backward", "float32", measured.sizes, int(6e10), 1, parts) for parts in (3, 4)]
    assert [rates.seconds({op: 1}) for op in ops] == [pytest.approx(1.0), pytest.approx(0.75)]
    forward = Op("attention", "float32", measured.sizes, int(8e10), 1)
    assert isclose(rates.seconds({forward: 1}), 1.0)


def test_between_sizes_attention_goes_by_lengths_and_the_head_s_size_more_than_by_how_many_heads():
    short, wide = ("float32", (8, 4, 256, 256, 64), about(1e9)), ("float32", (2, 8, 256, 256, 128), about(4e9))
    machine = laptop(attention=[Attention(*one, one[2]) for one in (short, wide)], op_s=Spread(0.0, 0.0, 0.0))
    rates = op_rates(machine)
    ops = [Op("attention", "float32", (2, 10, 256, 256, size), 4 * 10**9, 1) for size in (64, 128)]
    taken_s = [rates.seconds({op: 1}) for op in ops]
    assert taken_s[0] > 3.0 and taken_s[1] < 1.2  # 4.0 s at the rate of the one, 1.0 at that of the other
    split = rates.seconds({Op("attention", "float32", (20, 1, 256, 256, 64), 4 * 10**9, 1): 1})
    assert isclose(split, taken_s[0])


def test_a_disk_that_does_both_at_once_slower_is_that_much_slower():
    found = machine_of(laptop(disks={"/d": DISK}), dtype="float32", states="fp32", directories=["/d"])
    assert isclose(found.disk_read_bytes_per_s, 1.5e9)  # 1 / 2 + 1 / 4 of what it does alone
    assert isclose(found.disk_write_bytes_per_s, 3e9)
    assert found.slowed[Resource.COMPUTE, Resource.DISK] == found.slowed[Resource.UPDATES, Resource.DISK] == 1


def test_disks_and_computing_slow_one_another_as_was_measured():
    disks = {"/d": {**DISK, "slows_compute": about(1.5), "slowed_by_compute": about(1.2)}, "/e": DISK}
    found = machine_of(laptop(disks=disks), dtype="float32", states="fp32", directories=["/d", "/e"])
    assert found.slowed[Resource.COMPUTE, Resource.DISK] == found.slowed[Resource.UPDATES, Resource.DISK] == 1.5
    assert found.slowed[Resource.DISK, Resource.COMPUTE] == 1.2
    assert isclose(found.disk_read_bytes_per_s, 3e9)


def test_where_the_host_computes_a_layer_stands_still_as_long_as_updates_and_copies_take_alone():
    """Whatever was measured of updates beside computing: it is of a device that computes by itself."""
    measured = {"compute_beside_update": about(1.3), "disks": {"/d": {**DISK, "slows_compute": about(1.5)}}}
    ns = {"float32+fp32": {"alone": about(0.5), "beside_compute": about(0.6)}}
    host, device = (
        machine_of(one(host_update_ns=ns, **measured), dtype="float32", states="fp32", directories=["/d"])
        for one in (laptop, gpu)
    )
    assert host.d2h_bytes_per_s == laptop().link["d2h"].likely
    assert (host.launch_s, device.launch_s > 0) == (0, False)  # of no operators
    for other in (Resource.UPDATES, Resource.FETCHES, Resource.GRADIENTS):
        slows, is_slowed = host.slowed[Resource.COMPUTE, other], host.slowed[other, Resource.COMPUTE]
        assert is_slowed * (1 - 1 / slows) == 1
    assert (Resource.COMPUTE, Resource.FETCHES) not in device.slowed
    assert device.slowed[Resource.COMPUTE, Resource.UPDATES] == 1.3
    assert device.slowed[Resource.UPDATES, Resource.COMPUTE] == pytest.approx(1.2)
    assert host.slowed[Resource.COMPUTE, Resource.DISK] == device.slowed[Resource.COMPUTE, Resource.DISK] == 1.5


def test_disks_together_are_as_fast_as_the_slowest_of_them_as_often_as_there_are_some():
    """Each has the same part of every unit."""
    slow = {name: about(measured.likely / 10) for name, measured in DISK.items()}
    disks = {"/d": DISK, "/e": slow, "/f": DISK}
    found = machine_of(laptop(disks=disks), dtype="float32", states="fp32", directories=list(disks))
    assert isclose(found.disk_read_bytes_per_s, 3 * 0.15e9)
    assert isclose(found.disk_write_bytes_per_s, 3 * 0.3e9)


def test_a_directory_that_was_not_measured_is_refused():
    with pytest.raises(ValueError, match=r"speed of each directory .*'/d'.*stronghold probe --disk /d -o machine.json"):
        machine_of(laptop(), dtype="float32", states="fp32", directories=["/d"])
