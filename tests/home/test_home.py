"""The host's memory of one unit."""

import torch
from torch import nn

from stronghold.device import CpuDevice
from stronghold.home import Home
from stronghold.split import rounded
from stronghold.store import RamStore


def where():
    return RamStore(CpuDevice())


def home_of(*values, dtype=torch.float32, index=0):
    parameters = [nn.Parameter(value) for value in values]
    home = Home(index, "unit", parameters, dtype)
    home.place(where())
    return home, parameters


def test_weights_are_copied_into_one_buffer():
    a, b = torch.randn(3, 5), torch.randn(7)
    home, parameters = home_of(a, b)
    assert torch.equal(home.weight[0], a)
    assert torch.equal(home.weight[1], b)
    assert all(home.master(place) is home.weight[place] for place in (0, 1)), "fp32 needs no second copy"
    base = home.buffer.flat.data_ptr()
    assert [w.data_ptr() - base for w in home.weight] == list(home.layout.offsets)
    assert home.buffer.length_bytes == home.layout.total_bytes
    assert parameters[0].data_ptr() == a.data_ptr(), "placing leaves the parameters themselves alone"


def test_the_master_of_a_bf16_unit_is_exact_and_takes_two_bytes_more():
    value = torch.randn(50)
    home = Home(0, "unit", [nn.Parameter(value)], torch.bfloat16)
    home.place(store := where())
    assert home.weight[0].dtype is torch.bfloat16
    assert torch.equal(home.master(0), value)
    assert torch.equal(home.weight[0], rounded(value))
    assert home.remainder(0).dtype is torch.int16
    assert store.device.pageable_bytes == 2 * 50 + 2 * 50


def test_a_frozen_exact_parameter_has_a_remainder_only_once_it_is_updated():
    parameter = nn.Parameter(torch.randn(50).bfloat16(), requires_grad=False)
    home = Home(0, "unit", [parameter], torch.bfloat16)
    home.place(store := where())
    assert store.device.pageable_bytes == 2 * 50
    assert torch.equal(home.master(0), parameter.float())
    assert not home.remainder(0).any()
    assert store.device.pageable_bytes == 2 * 50 + 2 * 50


def test_a_resident_unit_lives_on_the_device():
    value = torch.randn(50)
    home = Home(0, "unit", [nn.Parameter(value)], torch.bfloat16, resident=True)
    device = CpuDevice()
    home.place(RamStore(device))
    assert torch.equal(home.master(0), value)
    assert device.pageable_bytes == 0
    assert device.resident_bytes == 2 * 50 + 2 * 50


def test_gradients_have_room_for_what_is_trained_and_grow_when_more_is():
    a, b, c = torch.randn(3), torch.randn(4), torch.randn(5)
    parameters = [nn.Parameter(a), nn.Parameter(b, requires_grad=False), nn.Parameter(c)]
    home = Home(0, "unit", parameters, torch.float32)
    home.place(where())
    assert home.gradients.places == (0, 2)
    assert home.gradients.layout.sizes == (12, 20, 8, 8), "two gradients and their squares"
    assert not home.gradients.fit()
    parameters[1].requires_grad_(True)
    assert home.gradients.fit()
    assert home.gradients.layout.sizes == (12, 16, 20, 8, 8, 8)
    buffer = home.gradients.allocate(CpuDevice())
    for place, shape in enumerate([(3,), (4,), (5,)]):
        home.gradients.view(buffer, place).fill_(place + 1.0)
        assert home.gradients.view(buffer, place).shape == shape
    assert [home.gradients.view(buffer, place)[0].item() for place in range(3)] == [1.0, 2.0, 3.0]
    parameters[0].requires_grad_(False)
    assert not home.gradients.fit(), "frozen again, it keeps its room"


def test_writes_show_once():
    home, (parameter,) = home_of(torch.zeros(3))
    home.versions = home.versions_now()
    generation = home.generation
    assert not home.was_written()
    with torch.no_grad():
        parameter.add_(1)
    assert home.was_written()
    assert not home.was_written()
    assert home.generation == generation + 1
    assert home.writes == 1
    home.touched = True
    assert home.was_written()
    assert home.writes == 2
    assert home.generation == generation + 1, "somebody may only have looked"
    assert not home.was_written()
