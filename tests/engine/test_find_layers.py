"""Which containers are taken for the rows of layers."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from stronghold.engine.find_layers import find_layers
from tests.small import SIZE, Block, Chain, EncoderDecoder, Mixed, Residual, TorchEncoder


def names(model, layers=None):
    return [layer.name for layer in find_layers(model, layers)]


class Holding(nn.Module):
    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


def linears(count, size=SIZE):
    return [nn.Linear(size, size) for _ in range(count)]


def blocks(count):
    return [Block() for _ in range(count)]


def test_layers_come_in_the_models_order_with_the_modules_themselves():
    model = Residual()
    found = find_layers(model)
    assert [layer.name for layer in found] == ["layers.0", "layers.1", "layers.2", "layers.3"]
    assert all(layer.module is module for layer, module in zip(found, model.layers, strict=True))


def test_two_rows_are_found():
    row = [f"{name}.{i}" for name in ("encoder", "decoder") for i in range(3)]
    assert names(EncoderDecoder()) == row


@pytest.mark.parametrize("kind", [nn.ModuleList, lambda x: nn.Sequential(*x), lambda x: _dictionary(x)])
def test_every_container_may_be_a_row(kind):
    assert names(Holding(row=kind(blocks(3)))) == [f"row.{i}" for i in range(3)]


def _dictionary(modules):
    return nn.ModuleDict({str(i): module for i, module in enumerate(modules)})


def test_the_model_itself_may_be_the_row():
    assert names(nn.Sequential(*linears(3))) == ["0", "1", "2"]
    assert names(nn.Sequential(OrderedDict(one=nn.Linear(2, 2), two=nn.Linear(2, 2)))) == ["one", "two"]


def test_what_has_no_parameters_is_left_out():
    assert names(Chain()) == ["net.0", "net.3", "net.6", "net.9"]


def test_layers_of_torchs_own_containers():
    assert names(TorchEncoder()) == [f"encoder.layers.{i}" for i in range(3)]


def test_layers_of_other_classes_belong_to_the_row():
    assert names(Mixed(), "layers") == [f"layers.{i}" for i in range(7)]
    row = nn.ModuleList([*blocks(2), nn.Linear(SIZE, SIZE), *blocks(1)])
    assert names(Holding(row=row)) == [f"row.{i}" for i in range(4)]


def test_a_row_inside_a_layer_is_part_of_the_layer():
    deep = nn.ModuleList(nn.Sequential(*linears(3)) for _ in range(2))
    assert names(Holding(row=deep)) == ["row.0", "row.1"]


def test_a_head_of_plain_linears_is_no_row_beside_a_larger_one():
    model = Holding(row=nn.ModuleList(blocks(4)), head=nn.Sequential(*linears(2, 4)))
    assert names(model) == [f"row.{i}" for i in range(4)]
    assert names(model, ["row", "head"]) == [*(f"row.{i}" for i in range(4)), "head.0", "head.1"]
    assert names(model, "head") == ["head.0", "head.1"]


def test_a_module_that_occurs_twice_is_one_layer():
    one, other = blocks(2)
    assert names(Holding(row=nn.ModuleList([one, other, one]))) == ["row.0", "row.1"]


def test_experts_are_not_taken_for_layers_within_layers():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(linears(4))

    assert names(Holding(layers=nn.ModuleList(Layer() for _ in range(3)))) == [f"layers.{i}" for i in range(3)]


def test_nothing_is_computed_or_changed():
    with torch.device("meta"):
        model = Residual()
    find_layers(model)
    assert all(p.is_meta for p in model.parameters())


def test_lists_of_blocks_are_no_layers_and_the_rows_are_inside():
    """PVT's and PoolFormer's stages were: nobody calls a list, and so no layer of theirs went through the window."""
    stages = nn.ModuleList([nn.ModuleList(blocks(2)), nn.ModuleList(blocks(3))])
    found = names(Holding(patches=nn.ModuleList(linears(2)), stages=stages))
    assert found == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1", "stages.1.2"]
    named = Holding(stages=nn.ModuleDict({"first": nn.ModuleDict({"a": Block(), "b": Block()}), "last": Block()}))
    assert names(named) == ["stages.first.a", "stages.first.b"]
    called = nn.ModuleList([nn.Sequential(*blocks(2)), nn.Sequential(*blocks(2))])
    assert names(Holding(stages=called)) == ["stages.0", "stages.1"]
