"""Where every parameter of a model goes."""

import torch

from stronghold.device import CpuDevice
from stronghold.engine.placement import plan
from stronghold.settings import OffloadSettings
from tests.delayed import Apart
from tests.small import Decoder, EncoderDecoder, Lending, Residual, Shared


def placed(model, device=None, **settings):
    return plan(model, None, settings.pop("dtype", None), OffloadSettings(**settings), device or CpuDevice())


def names_of(model, unit):
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for p in unit.parameters]


def test_every_parameter_has_one_place():
    for model in (Residual(), Decoder(), EncoderDecoder(), Shared()):
        placement = placed(model)
        everything = [id(p) for unit in placement.units for p in unit.parameters]
        assert sorted(everything) == sorted(id(p) for p in model.parameters())


def test_layers_are_numbered_in_the_order_of_the_rows():
    placement = placed(EncoderDecoder())
    layers = [unit for unit in placement.units if unit.layer is not None]
    assert [unit.name for unit in layers] == [f"{row}.{i}" for row in ("encoder", "decoder") for i in range(3)]
    assert [unit.layer for unit in layers] == list(range(6))


def test_what_is_outside_the_layers_is_a_root_parameter():
    model = Residual()
    placement = placed(model)
    assert [unit.name for unit, _ in placement.root] == ["into.weight", "into.bias", "out.weight", "out.bias"]
    assert all(unit.is_root and len(unit.parameters) == 1 for unit, _ in placement.root)


def test_what_layers_share_is_a_root_parameter():
    model = Shared()
    placement = placed(model)
    shared = [(unit, owners) for unit, owners in placement.root if unit.name == "layers.0.down.weight"]
    assert len(shared) == 1
    assert shared[0][1] == [(model.layers[0].down, "weight"), (model.layers[2].down, "weight")]
    assert "layers.0.down.weight" not in names_of(model, placement.layers[0])
    assert "layers.1.down.weight" in names_of(model, placement.layers[1])


def test_tied_parameters_are_one_root_parameter():
    model = Decoder()
    (tied,) = [owners for unit, owners in placed(model).root if unit.name == "words.weight"]
    assert tied == [(model.words, "weight"), (model.head, "weight")]


def test_planning_changes_nothing():
    model = Residual()
    before = [(id(p), p.data_ptr(), type(p), p._version) for p in model.parameters()]
    placed(model, window=3, dtype=torch.bfloat16)
    assert [(id(p), p.data_ptr(), type(p), p._version) for p in model.parameters()] == before
    assert "forward" not in vars(model.layers[0])


def test_the_window_is_a_layer_and_the_next_where_nobody_says():
    assert placed(Residual(), device=Apart()).window == 2
    assert placed(Residual(layers=2), device=Apart()).window == 2
    assert placed(Residual()).window == 0
    assert placed(Residual(), window=4).window == 4


def test_layers_without_parameters_of_their_own_are_no_layers_of_the_window():
    model = Lending()
    placement = placed(model)
    assert [unit.name for unit in placement.layers] == ["layers.0", "layers.2", "layers.3"]
    assert names_of(model, placement.layers[0]) == ["layers.0.norm.weight", "layers.0.norm.bias"]
    assert "layers.3.up.weight" in [unit.name for unit, _ in placement.root], "the head uses it too"
    assert "layers.3.down.weight" in names_of(model, placement.layers[2])
