"""The host's memory of one unit."""

import torch
from torch import nn

from stronghold.device import CpuDevice
from stronghold.home import Home


def home_of(*values, dtype=torch.float32, index=0):
    parameters = [nn.Parameter(value) for value in values]
    home = Home(index, "unit", parameters, dtype)
    home.place(CpuDevice())
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


def test_the_master_of_a_bf16_unit_is_exact():
    value = torch.randn(50)
    home, _ = home_of(value, dtype=torch.bfloat16)
    assert home.weight[0].dtype is torch.bfloat16
    assert torch.equal(home.master(0), value)
    assert torch.equal(home.weight[0], value.bfloat16())


def test_a_write_reaches_the_master_and_spares_its_low_bits_elsewhere():
    value = torch.randn(50)
    home, _ = home_of(value, dtype=torch.bfloat16)
    home.weight[0][7] = 3.0
    home.weight[0][8] = float("nan")
    home.take_writes()
    expected = value.clone()
    expected[7], expected[8] = 3.0, float("nan")
    assert torch.equal(home.master(0).nan_to_num(9.0), expected.nan_to_num(9.0))


def test_gradients_have_room_for_what_is_trained_and_grow_when_more_is():
    a, b, c = torch.randn(3), torch.randn(4), torch.randn(5)
    parameters = [nn.Parameter(a), nn.Parameter(b, requires_grad=False), nn.Parameter(c)]
    home = Home(0, "unit", parameters, torch.float32)
    home.place(CpuDevice())
    assert home.gradient_places == (0, 2)
    assert home.gradient_layout.sizes == (12, 20)
    assert not home.fit_gradients()
    parameters[1].requires_grad_(True)
    assert home.fit_gradients()
    assert home.gradient_layout.sizes == (12, 16, 20)
    buffer = home.place_gradients(CpuDevice())
    for place, shape in enumerate([(3,), (4,), (5,)]):
        home.gradient_in(buffer, place).fill_(place + 1.0)
        assert home.gradient_in(buffer, place).shape == shape
    assert [home.gradient_in(buffer, place)[0].item() for place in range(3)] == [1.0, 2.0, 3.0]
    parameters[0].requires_grad_(False)
    assert not home.fit_gradients(), "frozen again, it keeps its room"


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
    home.touched = True
    assert home.was_written()
    assert home.generation == generation + 1, "somebody may only have looked"
    assert not home.was_written()
