"""Remainders follow their weights: what the user writes counts exactly, all else keeps its low bits."""

import pytest
import torch

import stronghold
from stronghold.split import rounded
from stronghold.unit import unit_of
from stronghold.unit.masters import Masters, _marks
from tests.small import Residual, numbers, pair

SHAPE = (30, 7)  # 210 elements: three blocks and a part of one


def filled():
    value = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    masters, weight = Masters(), torch.empty(SHAPE, dtype=torch.bfloat16)
    masters.place(0, torch.empty(SHAPE, dtype=torch.int16), version=0)
    masters.fill(0, weight, value)
    assert torch.equal(masters.value(0, weight), value)
    return masters, weight, value


def test_a_write_through_the_parameter_spares_every_other_element():
    masters, weight, value = filled()
    versions = iter([0, 1])
    masters.write(0, weight, lambda: weight[2, 3:5].copy_(torch.tensor([0.5, float("nan")])), lambda: [next(versions)])
    masters.take_writes([weight], [1], shared=lambda index: False)
    value[2, 3], value[2, 4] = 0.5, float("nan")
    assert torch.equal(masters.value(0, weight).nan_to_num(9.0), value.nan_to_num(9.0))


def test_a_write_of_the_value_that_is_there_is_none():
    masters, weight, value = filled()
    masters.write(0, weight, lambda: weight.copy_(rounded(value)), lambda: [0])
    assert torch.equal(masters.value(0, weight), value)


def test_an_unseen_write_costs_its_block_of_64_its_low_bits():
    masters, weight, value = filled()
    masters.mark_aliased(0, weight)
    assert masters.marked
    weight.view(-1)[100] = 3.0
    masters.take_writes([weight], [0], shared=lambda index: True)
    expected = value.clone()
    expected.view(-1)[64:128] = rounded(value).float().view(-1)[64:128]
    expected.view(-1)[100] = 3.0
    assert torch.equal(masters.value(0, weight), expected)
    assert masters.marked, "it is still lent"
    weight.view(-1)[209] = 3.0
    masters.take_writes([weight], [0], shared=lambda index: False)
    expected.view(-1)[192:] = rounded(expected).float().view(-1)[192:]
    expected.view(-1)[209] = 3.0
    assert torch.equal(masters.value(0, weight), expected)
    assert not masters.marked


def test_an_unseen_write_before_a_seen_one_counts_too():
    """The seen one's marks forgot it: a zero kept the low bits of what it had replaced, with a negative one NaN."""
    masters, weight, value = filled()
    masters.mark_aliased(0, weight)
    weight.view(-1)[:64] = 0.0
    masters.write(0, weight, lambda: weight.copy_(weight.clone()), lambda: [0])
    masters.take_writes([weight], [0], shared=lambda index: False)
    value.view(-1)[:64] = 0.0
    assert torch.equal(masters.value(0, weight), value)


def test_an_update_of_a_lent_weight_is_no_write_of_the_users():
    masters, weight, value = filled()
    masters.mark_aliased(0, weight)
    masters.fill(0, weight, value * 1.5)
    masters.updated([weight], shared=lambda index: True)
    masters.take_writes([weight], [0], shared=lambda index: True)
    assert torch.equal(masters.value(0, weight), value * 1.5)


def test_a_write_that_shows_in_the_version_alone_clears_the_parameter():
    masters, weight, value = filled()
    weight[0, 0] = 3.0
    masters.take_writes([weight], [7], shared=lambda index: False)
    expected = rounded(value).float()
    expected[0, 0] = 3.0
    assert torch.equal(masters.value(0, weight), expected)


@pytest.mark.parametrize("elements", [1, 3, 63, 64, 65, 210, 5000])
def test_every_single_change_shows_in_its_mark_alone(elements):
    weight = torch.randn(elements).bfloat16()
    before = _marks(weight)
    assert len(before) == -(-elements // 64)
    for i in {0, elements // 2, elements - 1}:
        for bit in (0, 7, 15):
            changed = weight.clone()
            word = changed.view(torch.int16)
            word[i] ^= -(2**15) if bit == 15 else 2**bit
            assert torch.nonzero(_marks(changed) != before).flatten().tolist() == [i // 64]


WRITES = {
    "in place": lambda p: p.mul_(0.5),
    "an index": lambda p: p.__setitem__((0, 0), 0.5),
    "data": lambda p: p.data.mul_(0.5),
    "set data": lambda p: setattr(p, "data", torch.full(p.shape, 0.5, dtype=p.dtype)),
    "detach": lambda p: p.detach().fill_(0.5),
    "a view": lambda p: p[:2].mul_(0.5),
    "numpy": lambda p: p.detach().view(torch.int16).numpy().fill(0x3F00),
    "foreach": lambda p: torch._foreach_mul_([p], 0.5),
    "init": lambda p: torch.nn.init.constant_(p, 0.25),
    "out": lambda p: torch.mul(p.detach().clone(), 0.5, out=p.data),
    "state_dict": None,
}


@pytest.mark.parametrize("resident", [0, 3])
@pytest.mark.parametrize("name", ["layers.1.up.weight", "out.weight"])
@pytest.mark.parametrize("write", WRITES)
def test_however_a_weight_is_written_its_master_is_what_was_written(write, name, resident):
    """An element that changed has the value that was written, one that did not keeps its low bits or its block's."""
    _, model = pair(Residual, dtype=torch.bfloat16, resident=resident)
    optimizer = stronghold.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    parameter = model.get_parameter(name)
    unit, index = unit_of(parameter), parameter.__dict__["_index"]
    master = unit.master(index).clone()
    before = parameter.detach().clone()
    with torch.no_grad():
        if write == "state_dict":
            model.load_state_dict({n: v * 0.5 for n, v in model.state_dict().items()})
        else:
            WRITES[write](parameter)
        after = parameter.detach().clone()
    model(numbers(1)[0].bfloat16()).sum().backward()
    optimizer.step()
    optimizer.wait()
    now = unit.master(index)
    assert torch.equal(parameter, after)
    assert torch.equal(rounded(now), after)
    changed = before != after
    assert changed.any()
    assert torch.equal(now[changed], after[changed].float())
    blocks = changed.flatten().split(64)
    far = torch.cat([torch.full_like(b, not b.any()) for b in blocks]).view(changed.shape)
    assert torch.equal(now[far], master[far])
