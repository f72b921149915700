"""Muon's checkpoints: to the bit in both formats, and to and from the programs that step by torch.optim.Muon."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_state_dict,
)

import stronghold
from stronghold.errors import CheckpointError
from tests.crossed import crossed
from tests.muon import different, seen, train
from tests.muon_groups import ADAMW, MUON, groups, split_up
from tests.reference import CASES

MODELS = ("gpt", "llama", "bert")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of torch's own calls here


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    yield
    torch.set_num_threads(before)


class Plain:
    """A model of PyTorch alone, whose matrices torch.optim.Muon steps and all else torch.optim.AdamW."""

    def __init__(self, name: str, seed: int = 0) -> None:
        self.model = CASES[name].model(seed=seed)
        matrices, rest = split_up(self.model)
        self.optimizers = [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(rest, **ADAMW)]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def train(self, batches: list[Any]) -> list[float]:
        return train(self.model, self, batches)

    def states(self, **options: bool) -> dict[str, Any]:
        given = StateDictOptions(**options)
        return {
            "model": get_model_state_dict(self.model, options=given),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizers, options=given),
        }

    def seen(self) -> dict[str, torch.Tensor]:
        found = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        states = {p: state for optimizer in self.optimizers for p, state in optimizer.state.items()}
        for name, parameter in self.model.named_parameters():
            moments = {f"{name} {key}": v.clone() for key, v in states.get(parameter, {}).items() if key != "step"}
            found.update(moments)
        return found


def ours(name: str, seed: int = 0, muon: dict[str, Any] | None = None, **settings: Any) -> tuple[nn.Module, Any]:
    model = CASES[name].model(seed=seed)
    stronghold.offload(model, device="cpu", **{"window": 2, **settings})
    return model, stronghold.Muon(groups(model), **(muon or {}))


@pytest.mark.parametrize(
    ("case", "format"),
    crossed((("gpt", "float32"), ("llama", "bfloat16"), ("bert", "float32")), ("safetensors", "dcp"), together=1),
)
def test_what_follows_is_what_would_have_followed(case: tuple[str, str], format: Any, tmp_path: Path) -> None:
    name, dtype = case
    batches = CASES[name].batches(4)
    settings = {"dtype": getattr(torch, dtype)}
    model, optimizer = ours(name, **settings)
    train(model, optimizer, batches[:2])
    stronghold.checkpoint.save(tmp_path / "saved", model, optimizer, extra={"at": 2}, format=format)
    expected = train(model, optimizer, batches[2:])
    other, again = ours(
        name, 1, {"update": "in_backward"}, window=1, store=str(tmp_path / "store"), resident=1, **settings
    )
    train(other, again, CASES[name].batches(1, seed=9))
    assert stronghold.checkpoint.load(tmp_path / "saved", other, again, format=format) == {"at": 2}
    assert train(other, again, batches[2:]) == expected
    assert different(seen(other, again), seen(model, optimizer)) == []


@pytest.mark.parametrize("name", MODELS)
def test_plain_pytorch_goes_on_from_what_we_saved(name: str, tmp_path: Path) -> None:
    batches = CASES[name].batches(4)
    model, optimizer = ours(name)
    train(model, optimizer, batches[:2])
    stronghold.checkpoint.save(tmp_path / "saved", model, optimizer, format="dcp")
    theirs = Plain(name, seed=1)
    state = theirs.states()
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    set_state_dict(
        theirs.model, theirs.optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert different(theirs.seen(), seen(model, optimizer)) == []
    assert [g["lr"] for g in theirs.param_groups] == [g["lr"] for g in optimizer.param_groups]
    assert theirs.train(batches[2:]) == pytest.approx(train(model, optimizer, batches[2:]), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "flat"),
    [
        pytest.param("gpt", True, marks=pytest.mark.long),
        pytest.param("gpt", False, marks=pytest.mark.long),
        ("llama", False),
        ("bert", True),
    ],
)
def test_we_go_on_from_what_plain_pytorch_saved(name: str, flat: bool, tmp_path: Path) -> None:
    batches = CASES[name].batches(4)
    theirs = Plain(name)
    theirs.train(batches[:2])
    theirs.param_groups[0].update(momentum=0.9, ns_steps=4)
    dcp.save(theirs.states(flatten_optimizer_state_dict=flat), checkpoint_id=tmp_path / "saved")
    model, optimizer = ours(name, seed=1)
    assert stronghold.checkpoint.load(tmp_path / "saved", model, optimizer, format="dcp") is None
    assert different(seen(model, optimizer), theirs.seen()) == []
    for own, its in zip(optimizer.param_groups, theirs.param_groups, strict=True):
        assert {key: own[key] for key in its if key != "params"} == {k: v for k, v in its.items() if k != "params"}
    assert train(model, optimizer, batches[2:]) == pytest.approx(theirs.train(batches[2:]), rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_state_dictionaries_are_torchs_both_ways(name: str) -> None:
    """Each goes on from the other's to the bit, where Muon has all that is trained."""
    batches = CASES[name].batches(4)

    def alone(seed: int) -> tuple[nn.Module, Any]:
        model = CASES[name].model(seed=seed)
        return model, torch.optim.Muon(split_up(model)[0], **MUON)

    def offloaded(seed: int) -> tuple[nn.Module, Any]:
        model = CASES[name].model(seed=seed)
        stronghold.offload(model, device="cpu", window=2)
        return model, stronghold.Muon(split_up(model)[0], **MUON)

    runs = [alone(0), offloaded(0)]
    assert train(*runs[0], batches[:2]) == train(*runs[1], batches[:2])
    states = [copy.deepcopy((model.state_dict(), optimizer.state_dict())) for model, optimizer in runs]
    crossed = [alone(1), offloaded(1)]
    for (model, optimizer), (weights, state) in zip(crossed, reversed(states), strict=True):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    expected = train(*runs[0], batches[2:])
    assert all(train(*run, batches[2:]) == expected for run in (runs[1], *crossed))


def test_what_is_not_muons_is_refused(tmp_path: Path) -> None:
    model, optimizer = ours("gpt")
    train(model, optimizer, CASES["gpt"].batches(1))
    before = seen(model, optimizer)

    def refused(path: Path, match: str, of: Any = optimizer) -> None:
        with pytest.raises(CheckpointError, match=match):
            stronghold.checkpoint.load(path, of_model.get(id(of), model), of, format="dcp")

    of_model: dict[int, nn.Module] = {}
    other = CASES["gpt"].model()
    stronghold.offload(other, device="cpu", window=2)
    adamw = stronghold.AdamW([{"params": part} for part in split_up(other)])
    of_model[id(adamw)] = other
    stronghold.checkpoint.save(tmp_path / "muons", model, optimizer, format="dcp")
    refused(tmp_path / "muons", "AdamW for group 0, and Muon in", adamw)

    theirs = Plain("gpt")
    theirs.train(CASES["gpt"].batches(1))
    dcp.save(theirs.states(), checkpoint_id=tmp_path / "theirs")
    refused(tmp_path / "theirs", "AdamW for group 0, and Muon in", adamw)
    name = next(iter(theirs.states()["optimizer"]["state"]))
    for key, value, match in (
        ("momentum_buffer", torch.tensor(torch.nan), "and Muon would make weights of it"),
        ("momentum_buffer", torch.zeros(3), r"got .* of shape \[3\]"),
        ("exp_avg", None, "and moments of Muon .got no tensor"),
    ):
        state = theirs.states()
        its = dict(state["optimizer"]["state"][name])
        shape = its["momentum_buffer"].shape
        if value is None:
            its = {"exp_avg": its.pop("momentum_buffer"), "step": torch.tensor(1.0)}
        else:
            its[key] = value.expand(shape) if not value.ndim else value
        state["optimizer"]["state"][name] = its
        dcp.save(state, checkpoint_id=tmp_path / match)
        refused(tmp_path / match, match)
    sgd = Plain("gpt")
    sgd.optimizers[0] = torch.optim.SGD(split_up(sgd.model)[0], lr=1e-2, momentum=0.9)
    sgd.train(CASES["gpt"].batches(1))
    dcp.save(sgd.states(), checkpoint_id=tmp_path / "sgd")
    refused(tmp_path / "sgd", r"belongs to AdamW's state .it has no optimizer\.param_groups\.0\.betas")
    assert different(seen(model, optimizer), before) == []
