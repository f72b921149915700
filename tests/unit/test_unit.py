"""The host's memory of one unit."""

import torch
from torch import nn

from stronghold.device import CpuDevice
from stronghold.split import rounded
from stronghold.store import RamStore
from stronghold.unit import Unit


def where():
    return RamStore(CpuDevice())


def unit_of(*values, dtype=torch.float32, layer=0):
    parameters = [nn.Parameter(value) for value in values]
    unit = Unit(layer, "unit", parameters, dtype)
    unit.place(where())
    return unit, parameters


def test_weights_are_copied_into_one_buffer():
    a, b = torch.randn(3, 5), torch.randn(7)
    unit, parameters = unit_of(a, b)
    assert torch.equal(unit.weight[0], a)
    assert torch.equal(unit.weight[1], b)
    assert all(unit.master(index) is unit.weight[index] for index in (0, 1)), "fp32 needs no second copy"
    base = unit.buffer.flat.data_ptr()
    assert [w.data_ptr() - base for w in unit.weight] == list(unit.layout.offsets)
    assert unit.buffer.length_bytes == unit.layout.total_bytes
    assert parameters[0].data_ptr() == a.data_ptr(), "placing leaves the parameters themselves alone"


def test_the_master_of_a_bf16_unit_is_exact_and_takes_two_bytes_more():
    value = torch.randn(50)
    unit = Unit(0, "unit", [nn.Parameter(value)], torch.bfloat16)
    unit.place(store := where())
    assert unit.weight[0].dtype is torch.bfloat16
    assert torch.equal(unit.master(0), value)
    assert torch.equal(unit.weight[0], rounded(value))
    assert unit.remainder(0).dtype is torch.int16
    assert store.device.pageable_bytes == 2 * 50 + 2 * 50


def test_a_frozen_exact_parameter_has_a_remainder_only_once_it_is_updated():
    parameter = nn.Parameter(torch.randn(50).bfloat16(), requires_grad=False)
    unit = Unit(0, "unit", [parameter], torch.bfloat16)
    unit.place(store := where())
    assert store.device.pageable_bytes == 2 * 50
    assert torch.equal(unit.master(0), parameter.float())
    assert not unit.remainder(0).any()
    assert store.device.pageable_bytes == 2 * 50 + 2 * 50


def test_a_resident_unit_lives_on_the_device():
    value = torch.randn(50)
    unit = Unit(0, "unit", [nn.Parameter(value)], torch.bfloat16, resident=True)
    device = CpuDevice()
    unit.place(RamStore(device))
    assert torch.equal(unit.master(0), value)
    assert device.pageable_bytes == 0
    assert device.resident_bytes == 2 * 50 + 2 * 50


def test_gradients_have_room_for_what_is_trained_and_grow_when_more_is():
    a, b, c = torch.randn(3), torch.randn(4), torch.randn(5)
    parameters = [nn.Parameter(a), nn.Parameter(b, requires_grad=False), nn.Parameter(c)]
    unit = Unit(0, "unit", parameters, torch.float32)
    unit.place(where())
    assert unit.gradients.indices == (0, 2)
    assert unit.gradients.layout.sizes == (12, 20, 8, 8), "two gradients and their squares"
    assert not unit.gradients.fit()
    parameters[1].requires_grad_(True)
    assert unit.gradients.fit()
    assert unit.gradients.layout.sizes == (12, 16, 20, 8, 8, 8)
    buffer = unit.gradients.allocate(CpuDevice())
    for index, shape in enumerate([(3,), (4,), (5,)]):
        unit.gradients.view(buffer, index).fill_(index + 1.0)
        assert unit.gradients.view(buffer, index).shape == shape
    assert [unit.gradients.view(buffer, index)[0].item() for index in range(3)] == [1.0, 2.0, 3.0]
    parameters[0].requires_grad_(False)
    assert not unit.gradients.fit(), "frozen again, it keeps its room"


def test_writes_show_once():
    unit, (parameter,) = unit_of(torch.zeros(3))
    unit.versions = unit.versions_now()
    generation = unit.generation
    assert not unit.was_written()
    with torch.no_grad():
        parameter.add_(1)
    assert unit.was_written()
    assert not unit.was_written()
    assert unit.generation == generation + 1
    assert unit.writes == 1
    unit.touched = True
    assert unit.was_written()
    assert unit.writes == 2
    assert unit.generation == generation + 1, "somebody may only have looked"
    assert not unit.was_written()
