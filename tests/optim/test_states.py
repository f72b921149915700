"""The moments: how they lie, and that each parameter has its own."""

import weakref

import torch
from torch import nn

from stronghold.device import CpuDevice
from stronghold.optim.states import Moments, lay_out_moments
from stronghold.store import RamStore
from stronghold.unit import Unit


def made(*shapes):
    unit = Unit(0, "unit", [nn.Parameter(torch.randn(shape)) for shape in shapes], torch.bfloat16)
    unit._device = CpuDevice()
    unit._store = RamStore(unit._device)  # a unit refers to it weakly
    unit._memory_of = weakref.ref(unit._store)
    return unit


def test_moments_are_fp32_and_zero_in_the_parameters_shape_and_overlap_nowhere():
    unit = made((3, 5), (), (0, 2), (7,))
    device = unit._device
    moments = Moments("fp32")
    moments.allocate(unit, range(4))
    assert device.pageable_bytes == lay_out_moments(unit, range(4), "fp32").total_bytes
    views = [view for index in range(4) for view in moments.of(unit, index)]
    for number, view in enumerate(views):
        assert view.dtype is torch.float32
        assert not view.any()
        view.fill_(number + 1.0)
    assert [view.shape for view in views[::2]] == [(3, 5), (), (0, 2), (7,)]
    assert all((view == number + 1.0).all() for number, view in enumerate(views))


def test_only_what_is_asked_for_takes_memory_and_once():
    unit = made((100,), (1000,))
    device = unit._device
    moments = Moments("fp32")
    moments.allocate(unit, [0])
    first = moments.of(unit, 0)
    assert device.pageable_bytes < 2000
    moments.allocate(unit, [0, 1])
    assert 8000 <= device.pageable_bytes < 10_000
    assert moments.of(unit, 0)[0] is first[0]


def test_a_state_that_was_dropped_begins_at_zero_again():
    moments, unit = Moments("fp32"), made((4,))
    one, other = moments.begin(unit, 0)
    one.fill_(3.0)
    other.fill_(4.0)
    assert moments.of(unit, 0)[0][0] == 3.0
    one, other = moments.begin(unit, 0)
    assert not one.any()
    assert not other.any()
