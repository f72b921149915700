"""A loaded checkpoint is the training that was saved: to the bit, wherever and however it is loaded."""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import stronghold
from stronghold.errors import BudgetError, CheckpointError, CorruptionError, OffloadedModelError
from stronghold.formats.manifest import read_manifest
from stronghold.unit import unit_of
from tests.checkpoint.training import Training, of_kind
from tests.crossed import crossed
from tests.reference import CASES, differences, snapshot
from tests.small import KINDS, Frozen, Residual

FORMATS = crossed(("fp32", "bf16"), ("fp32", "8bit"), ("ram", "disk"), ("deferred", "in_backward"), together=1)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EACH_TIME = ("structured", "stateful", "spectral", "shared", "lending", "frozen", "mixed")
"""Those of the small models that have most beside plain layers; the others are long."""


def here(store: str, tmp_path: Any) -> str:
    return store if store == "ram" else str(tmp_path / f"store{random.random()}")


def masters(training: Training) -> dict[str, torch.Tensor]:
    training.optimizer.wait()
    found = {}
    for name, parameter in training.model.named_parameters():
        unit = unit_of(parameter)
        assert unit is not None
        found[name] = unit.master(parameter.__dict__["_index"]).clone()
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("dtype", "states", "store", "update"), FORMATS)
def test_what_follows_is_what_would_have_followed(
    dtype: str, states: str, store: str, update: str, tmp_path: Any
) -> None:
    """Dropout, clipping, a scheduler; then on in another window, store, resident layers, threads, way of updating."""
    case = CASES["gpt"]
    batches = case.batches(5)
    common = {"dtype": DTYPES[dtype], "states": states}
    first = Training(case.model(), window=2, store=here(store, tmp_path), update=update, clip=None, **common)
    torch.manual_seed(3)
    first.steps(batches[:2])
    path = first.save(tmp_path / "saved", extra={"position": 2})
    saved, rates = snapshot(first.model, first.optimizer), first.scheduler.get_last_lr()
    losses = first.steps(batches[2:])
    final = snapshot(first.model, first.optimizer)
    others = [
        {"window": 4, "store": here("ram" if store == "disk" else "disk", tmp_path), "threads": 1},
        {"window": 1, "store": here(store, tmp_path), "resident": 2, "update": update},
    ]
    for number, settings in enumerate(others):
        other = Training(case.model(seed=1), clip=None, **common, **settings)
        if number == 0:
            other.steps(case.batches(1, seed=9))  # one that was used before: fetches and states of its own are there
        torch.manual_seed(99)
        assert other.load(path) == {"position": 2}
        if number:  # only here, for to look at parameters has the window fetch them again
            assert differences(snapshot(other.model, other.optimizer), saved) == [], settings
        assert other.scheduler.get_last_lr() == rates
        assert other.steps(batches[2:]) == losses, settings
        assert differences(snapshot(other.model, other.optimizer), final) == [], settings
        resident = settings.get("resident")
        if resident:  # and what resident layers save, others load
            again = other.save(tmp_path / "again")
            back = Training(case.model(seed=2), clip=None, window=3, **common)
            back.load(again)
            assert differences(snapshot(back.model, back.optimizer), final) == []


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in EACH_TIME else pytest.mark.long)
        for name in KINDS
        if name not in ("residual", "counting")
    ],
)
def test_every_kind_of_model_goes_on_to_the_bit(name: str, tmp_path: Any) -> None:
    """Buffers that change, parameters without elements or gradient, shared and frozen ones; with clipping."""
    training, kind = of_kind(name)
    batches = kind.batches(4)
    training.steps(batches[:2])
    path = training.save(tmp_path / "saved")
    losses, final = training.steps(batches[2:]), snapshot(training.model, training.optimizer)
    other, _ = of_kind(name, seed=1, window=1)
    other.load(path)
    assert other.steps(batches[2:]) == losses
    assert differences(snapshot(other.model, other.optimizer), final) == []


@pytest.mark.parametrize(("saved_as", "store"), crossed(("fp32", "bf16"), ("ram", "disk"), together=1))
def test_masters_are_exact_in_either_compute_type(saved_as: str, store: str, tmp_path: Any) -> None:
    """Frozen layers too, whose fp32 values bf16 alone does not hold; and back again."""
    loaded_as = "bf16" if saved_as == "fp32" else "fp32"
    training, kind = of_kind("frozen", dtype=DTYPES[saved_as])
    training.steps(kind.batches(2))
    path, expected = training.save(tmp_path / "saved"), masters(training)
    other, _ = of_kind("frozen", seed=1, dtype=DTYPES[loaded_as], store=here(store, tmp_path))
    other.load(path)
    assert same(masters(other), expected)
    back, _ = of_kind("frozen", seed=2, dtype=DTYPES[saved_as])
    back.load(other.save(tmp_path / "again"))
    assert differences(snapshot(back.model, back.optimizer), snapshot(training.model, training.optimizer)) == []


def test_fp32_values_go_into_frozen_bf16_parameters_that_had_no_remainder(tmp_path: Any) -> None:
    torch.manual_seed(0)
    training = Training(Frozen(), window=2)
    path, expected = training.save(tmp_path / "saved"), masters(training)
    other = Training(Frozen().bfloat16(), window=2)
    frozen = unit_of(other.model.layers[0].up.weight)
    assert frozen is not None and not frozen.masters
    other.load(path)
    assert same(masters(other), expected)
    other.load(Training(Frozen().bfloat16(), window=2).save(tmp_path / "rounded"))
    assert all(not remainder.any() for remainder in frozen.masters.remainders.values()), "old low bits must go"


def test_eight_bit_moments_go_into_fp32_exactly_and_not_back(tmp_path: Any) -> None:
    training, kind = of_kind(states="8bit")
    training.steps(kind.batches(2))
    path, expected = training.save(tmp_path / "saved"), training.optimizer.state_dict()["state"]
    other, _ = of_kind(seed=1)
    other.load(path)
    found = other.optimizer.state_dict()["state"]
    assert found.keys() == expected.keys()
    for number, state in expected.items():
        assert all(torch.equal(found[number][key], state[key]) for key in ("step", "exp_avg", "exp_avg_sq"))
    again = other.save(tmp_path / "again")
    before = snapshot(training.model, training.optimizer)
    with pytest.raises(CheckpointError, match=r"do not go into eight bits.*build AdamW with states='fp32'"):
        training.load(again)
    assert differences(snapshot(training.model, training.optimizer), before) == []


def test_many_eight_bit_elements_are_decoded_in_parts(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stronghold.checkpoint.unit_loading._PART", 64)
    test_eight_bit_moments_go_into_fp32_exactly_and_not_back(tmp_path)


def test_states_are_taken_away_where_the_checkpoint_has_none(tmp_path: Any) -> None:
    training, kind = of_kind()
    path = training.save(tmp_path / "first")
    losses = training.steps(kind.batches(3))
    torch.manual_seed(0)
    training.load(path)
    assert not training.optimizer.state
    assert training.steps(kind.batches(3)) == losses, "the moments must begin at zero again"


def test_random_states_are_put_back(tmp_path: Any) -> None:
    training, _ = of_kind()
    path = training.save(tmp_path / "saved")
    draws = [torch.rand(3).tolist(), random.random(), np.random.rand(), random.gauss(0, 1), np.random.randn()]
    training.load(path)
    assert [torch.rand(3).tolist(), random.random(), np.random.rand(), random.gauss(0, 1), np.random.randn()] == draws


def test_extra_and_the_counts_come_back(tmp_path: Any) -> None:
    training, _ = of_kind()
    extra = {"position": 7, "mean": 0.1, "ids": torch.arange(3), "pair": (1, None), "none": float("inf")}
    training.optimizer.skipped_steps = 3
    path = training.save(tmp_path / "saved", extra=extra)
    other, _ = of_kind()
    found = other.load(path)
    assert torch.equal(found.pop("ids"), extra.pop("ids"))
    assert found == extra
    assert other.optimizer.skipped_steps == 3
    assert other.optimizer.param_groups[0]["betas"] == (0.95, 0.999), "the scheduler's momentum"


def test_a_rate_that_is_a_tensor_stays_that_tensor(tmp_path: Any) -> None:
    training, _ = of_kind()
    training.optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    path = training.save(tmp_path / "saved")
    rate = training.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    training.load(path)
    assert training.optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.25
    other, _ = of_kind()
    other.load(path)
    assert other.optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(("dtype", "unseen"), crossed(("fp32", "bf16"), (False, True), together=1))
def test_what_the_user_wrote_is_saved_and_what_he_writes_after_loading_counts(
    dtype: str, unseen: bool, tmp_path: Any
) -> None:
    training, kind = of_kind(dtype=DTYPES[dtype])
    training.steps(kind.batches(1))
    parameter, root = training.model.layers[1].up.weight, training.model.out.weight
    with torch.no_grad():
        for one in (parameter, root):
            (one.data if unseen else one).fill_(0.375)
    path = training.save(tmp_path / "saved")
    with torch.no_grad():
        parameter.fill_(-1.0)  # pending when it is loaded: must not be taken for writes into what was loaded
        root.fill_(-1.0)
        torch._foreach_mul_([training.model.layers[2].up.weight, training.model.layers[2].down.weight], 2.0)
    training.load(path)
    assert (parameter == 0.375).all() and (root == 0.375).all()
    expected = masters(training)
    assert (expected["layers.1.up.weight"] == 0.375).all()
    losses = training.steps(kind.batches(2))
    second = masters(training)
    other, _ = of_kind(seed=3, dtype=DTYPES[dtype])
    other.load(path)
    assert same(masters(other), expected)
    assert other.steps(kind.batches(2)) == losses
    assert same(masters(other), second)


def test_a_held_alias_does_not_clear_what_is_loaded(tmp_path: Any) -> None:
    training, kind = of_kind(dtype=torch.bfloat16)
    training.steps(kind.batches(2))
    path, expected = training.save(tmp_path / "saved"), masters(training)
    other, _ = of_kind(seed=1, dtype=torch.bfloat16)
    held = [p.data for p in other.model.parameters()]
    other.steps(kind.batches(1))
    other.load(path)
    other.model(kind.batches(1)[0].bfloat16())
    assert same(masters(other), expected)
    assert held


def change(kind: str) -> Residual:
    torch.manual_seed(0)
    model = Residual(layers=5 if kind == "more" else 3 if kind == "fewer" else 4)
    if kind == "wider":
        model.out = torch.nn.Linear(16, 4)
    if kind == "buffer":
        model.register_buffer("scale", torch.ones(2))
    return model


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("more", r"first difference: parameter layers\.4\.norm\.weight, none in .* and \[16\] in this Residual"),
        ("fewer", r"first difference: parameter layers\.3\.norm\.weight, \[16\] in .* and none in this"),
        ("wider", r"first difference: parameter out\.weight, \[3, 16\] in .* and \[4, 16\]"),
        ("buffer", r"first difference: buffer scale, none in .* and \['float32', 2\]"),
    ],
)
def test_another_model_is_refused_with_the_first_difference(kind: str, message: str, tmp_path: Any) -> None:
    training, _ = of_kind()
    path = training.save(tmp_path / "saved")
    other = Training(change(kind), window=2)
    before = snapshot(other.model, other.optimizer)
    with pytest.raises(CheckpointError, match=message):
        other.load(path)
    assert differences(snapshot(other.model, other.optimizer), before) == []


def test_other_groups_models_and_optimizers_are_refused(tmp_path: Any) -> None:
    training, _ = of_kind()
    path = training.save(tmp_path / "saved")
    other, _ = of_kind()
    one_group = stronghold.AdamW(other.model.parameters())
    with pytest.raises(CheckpointError, match="got 1 groups, 2 in"):
        stronghold.checkpoint.load(path, other.model, one_group)
    swapped = list(reversed([{**g, "params": list(g["params"])} for g in other.optimizer.param_groups]))
    with pytest.raises(CheckpointError, match=r"first difference: into\.bias is only here in group 0"):
        stronghold.checkpoint.load(path, other.model, stronghold.AdamW(swapped))
    for optimizer in (training.optimizer, torch.optim.AdamW(other.model.parameters())):
        with pytest.raises(OffloadedModelError, match="the model's own optimizer"):
            stronghold.checkpoint.load(path, other.model, optimizer)
    with pytest.raises(OffloadedModelError, match="of an offloaded model"):
        stronghold.checkpoint.load(path, Residual(), other.optimizer)


def test_a_scheduler_without_a_saved_state_is_refused(tmp_path: Any) -> None:
    training, _ = of_kind()
    path = stronghold.checkpoint.save(tmp_path / "saved", training.model, training.optimizer)
    with pytest.raises(CheckpointError, match="no scheduler's state"):
        training.load(path)


def test_states_that_do_not_fit_are_refused_before_anything_changes(tmp_path: Any) -> None:
    training, kind = of_kind()
    training.steps(kind.batches(1))
    path = training.save(tmp_path / "saved")
    other, _ = of_kind(seed=1)
    before = masters(other)
    other.optimizer._moments = type(other.optimizer._moments)("fp32")  # as if none had been allocated
    engine = other.model.__dict__["_stronghold"]
    engine.budget._host_memory = 1000
    with pytest.raises(BudgetError):
        other.load(path)
    assert same(masters(other), before)


def flip(path: Any, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        octet = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([octet ^ 4]))


@pytest.mark.parametrize("verify", [True, False])
def test_a_damaged_file_changes_nothing_or_is_said_to_have(verify: bool, tmp_path: Any) -> None:
    training, kind = of_kind()
    training.steps(kind.batches(1))
    path = training.save(tmp_path / "saved")
    file = path / "layer-00002.safetensors"
    flip(file, os.path.getsize(file) - 5)
    other, _ = of_kind(seed=1)
    before = snapshot(other.model, other.optimizer)
    if verify:
        with pytest.raises(CorruptionError, match=r"the file of layers\.2 is damaged: .*layer-00002\.safetensors"):
            other.load(path)
        assert differences(snapshot(other.model, other.optimizer), before) == []
        return
    with pytest.raises(CheckpointError, match=r"now holds parts of it.*layers\.2 is damaged"):
        other.load(path, verify=False)
    good = training.save(tmp_path / "good")
    other.load(good)
    expected = training.steps(kind.batches(2)), other.load(good)
    assert other.steps(kind.batches(2)) == expected[0]


class Turned(Residual):
    """Layers whose inputs are turned by frequencies of ``theta``, and a cache; no ``state_dict()`` has either."""

    def __init__(self, theta: float, length: int = 13, factor: float = 1.0) -> None:
        super().__init__()
        frequencies = factor / theta ** (torch.arange(self.into.out_features) / self.into.out_features)
        for layer in self.layers:
            layer.register_buffer("frequencies", frequencies.clone(), persistent=False)
            layer.register_forward_pre_hook(lambda layer, given: (given[0] * layer.frequencies.cos(), *given[1:]))
        self.register_buffer("cache", torch.cos(torch.arange(length) / theta), persistent=False)


def turned(theta: float, length: int = 13, factor: float = 1.0, **settings: Any) -> Training:
    torch.manual_seed(0)
    return Training(Turned(theta, length, factor), window=2, **settings)


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_what_another_configuration_computes_stays_as_load_state_dict_leaves_it(tmp_path: Any, format: Any) -> None:
    first = turned(10.0)
    batches = KINDS["residual"].batches(4)
    first.steps(batches[:2])
    path = first.save(tmp_path / "saved", format=format)
    other = turned(50.0, length=66)
    with pytest.warns(RuntimeWarning, match=r"stay as this model computes .*got cache, layers\.0\.frequencies, "):
        other.load(path, format=format)
    torch.manual_seed(0)
    plain = Turned(50.0, length=66)
    plain.load_state_dict(first.model.state_dict())
    for (name, value), expected in zip(other.model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(value, expected), name
    with torch.no_grad():
        assert torch.equal(other.model.eval()(batches[2]), plain.eval()(batches[2]))
    moments = [[state["exp_avg"] for state in one.optimizer.state_dict()["state"].values()] for one in (first, other)]
    assert all(torch.equal(one, two) for one, two in zip(*moments, strict=True))


def test_what_training_changed_comes_back_and_is_told_of_where_it_was_built_otherwise(tmp_path: Any) -> None:
    first = turned(10.0)
    first.model.layers[1].frequencies.mul_(0.5)
    first.model.cache = torch.arange(40.0)
    path = first.save(tmp_path / "saved")
    same = turned(10.0)
    same.load(path)
    assert torch.equal(same.model.layers[1].frequencies, first.model.layers[1].frequencies)
    assert torch.equal(same.model.cache, torch.arange(40.0))
    other = turned(50.0)
    with pytest.warns(RuntimeWarning, match=r"become the checkpoint's, for training .*got cache, layers\.1\.freq"):
        other.load(path)
    assert torch.equal(other.model.layers[1].frequencies, first.model.layers[1].frequencies)
    assert torch.equal(other.model.cache, torch.arange(40.0))
    assert torch.equal(other.model.layers[0].frequencies, Turned(50.0).layers[0].frequencies)


def test_what_another_processor_computes_a_little_otherwise_comes_back_to_the_bit(tmp_path: Any) -> None:
    first = turned(10.0)
    path = first.save(tmp_path / "saved")
    other = turned(10.0, factor=1 + 1e-6)
    assert not torch.equal(other.model.layers[0].frequencies, first.model.layers[0].frequencies)
    other.load(path)
    again = other.save(tmp_path / "again")
    for one, place in ((other, path), (turned(10.0), again), (turned(10.0, factor=1 - 1e-6), again)):
        one.load(place)
        for (name, value), expected in zip(one.model.named_buffers(), first.model.buffers(), strict=True):
            assert torch.equal(value, expected), name


@pytest.mark.parametrize("theta", [10.0, 50.0])
def test_a_store_that_is_reopened_has_the_buffers_of_its_configuration(tmp_path: Any, theta: float) -> None:
    place = str(tmp_path / "store")
    first = turned(10.0, store=place)
    first.steps(KINDS["residual"].batches(1))
    first.save(place)
    stronghold.close(first.model)
    other = turned(theta, store=place, weights=place)
    for (name, value), expected in zip(other.model.named_buffers(), Turned(theta).buffers(), strict=True):
        assert torch.equal(value, expected), name
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        other.load(place)
    assert [one for one in found if "stay as this model" in str(one.message)] == found[: theta != 10.0]
    for (name, value), expected in zip(other.model.named_buffers(), Turned(theta).buffers(), strict=True):
        assert torch.equal(value, expected), name


def test_an_earlier_version_that_did_not_tell_is_believed_and_told_of(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = turned(10.0)
    monkeypatch.setattr("stronghold.formats.built_buffers.BuiltBuffers.of", lambda *_: None)
    path = first.save(tmp_path / "saved")
    monkeypatch.undo()
    assert all(entry.built is None for entry in read_manifest(path).buffers.values())
    same, other = turned(10.0), turned(50.0)
    same.load(path)
    with pytest.warns(RuntimeWarning, match=r"become the checkpoint's, for training .*got cache, layers\.0\.freq"):
        other.load(path)
    for (name, value), expected in zip(other.model.named_buffers(), first.model.buffers(), strict=True):
        assert torch.equal(value, expected), name


def test_buffers_that_state_dict_has_not_take_the_saved_shape_and_odd_dtypes_are_kept(tmp_path: Any) -> None:
    def build() -> Training:
        model = Residual()
        model.register_buffer("grown", torch.arange(3), persistent=False)
        model.register_buffer("angles", torch.polar(torch.ones(3), torch.arange(3.0)))
        model.register_buffer("empty", torch.zeros(0, dtype=torch.complex64))
        model.register_buffer("later", None)
        return Training(model, window=2)

    training = build()
    training.model.grown = torch.arange(7)  # as it does in a forward pass over more than before
    assert isinstance(training.model.angles, torch.Tensor)
    training.model.angles.mul_(2)
    path = training.save(tmp_path / "saved")
    other = build()
    other.load(path)
    assert torch.equal(other.model.grown, torch.arange(7))
    assert torch.equal(other.model.angles, training.model.angles)
    plain = Training(change("same"), window=2)
    with pytest.raises(CheckpointError, match="buffer angles"):
        plain.load(path)
