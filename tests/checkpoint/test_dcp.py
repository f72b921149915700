"""Checkpoints go to torch.distributed.checkpoint and come from it, with every element."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
from itertools import pairwise
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
from stronghold.checkpoint import dcp_saving
from stronghold.checkpoint.unit_tensors import names_of
from stronghold.errors import CheckpointError
from tests.checkpoint import sharded
from tests.checkpoint.test_loading import DTYPES, masters, same
from tests.checkpoint.training import Training, of_kind
from tests.crossed import crossed
from tests.distributed.launched import launch
from tests.reference import CASES, differences, snapshot
from tests.small import KINDS, Residual, numbers

BATCHES = numbers(2 * sharded.STEPS)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of torch's own calls here


def ours(model: nn.Module, **settings: Any) -> tuple[nn.Module, stronghold.AdamW]:
    model = stronghold.offload(model, device="cpu", window=2, layers="layers", **settings)
    return model, stronghold.AdamW(sharded.parts(model), lr=1e-2, betas=(0.85, 0.99))


def masters_of(model: nn.Module, optimizer: stronghold.AdamW) -> dict[str, torch.Tensor]:
    optimizer.wait()
    return {
        name: unit.master(index).clone() for unit, names in names_of(model).items() for index, name in enumerate(names)
    }


def states_of(model: nn.Module, optimizer: Any, **options: bool) -> dict[str, Any]:
    """Returns what torch's own programs save and load."""
    given = StateDictOptions(**options)
    return {
        "model": get_model_state_dict(model, options=given),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=given),
    }


@pytest.mark.parametrize(("dtype", "store"), crossed(("fp32", "bf16"), ("ram", "disk"), together=1))
def test_plain_pytorch_goes_on_from_what_we_saved(dtype: str, store: str, tmp_path: Any) -> None:
    model, optimizer = ours(
        sharded.plain(), dtype=DTYPES[dtype], store=store if store == "ram" else str(tmp_path / "s")
    )
    cast = [batch.to(DTYPES[dtype]) for batch in BATCHES]
    sharded.train(model, optimizer, cast[: sharded.STEPS])
    stronghold.checkpoint.save(tmp_path / "saved", model, optimizer, format="dcp")
    theirs = sharded.plain()
    adamw = sharded.adamw(theirs)
    state = states_of(theirs, adamw)
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    set_state_dict(theirs, adamw, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    held = optimizer.state_dict()["state"]
    kept = masters_of(model, optimizer)
    names = {parameter: name for name, parameter in theirs.named_parameters()}
    for number, parameter in enumerate(p for group in adamw.param_groups for p in group["params"]):
        assert torch.equal(parameter, kept[names[parameter]])
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(adamw.state[parameter][key], held[number][key]), (names[parameter], key)
    assert [g["lr"] for g in adamw.param_groups] == [1e-2, 3e-3]
    if dtype == "fp32":
        expected = sharded.train(theirs, adamw, BATCHES[sharded.STEPS :])
        assert sharded.train(model, optimizer, BATCHES[sharded.STEPS :]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("prefix", "flat"), crossed(("", "app."), (False, True), together=1))
def test_we_go_on_from_what_plain_pytorch_saved(prefix: str, flat: bool, tmp_path: Any) -> None:
    theirs = sharded.plain()
    adamw = sharded.adamw(theirs)
    sharded.train(theirs, adamw, BATCHES[: sharded.STEPS])
    for group, rate in zip(adamw.param_groups, (2e-3, 5e-4), strict=True):
        group["lr"] = rate
    state = states_of(theirs, adamw, flatten_optimizer_state_dict=flat)
    dcp.save({"app": state} if prefix else state, checkpoint_id=tmp_path / "saved")
    model, optimizer = ours(sharded.plain())
    sharded.train(model, optimizer, BATCHES[:1])
    torch.manual_seed(7)
    assert stronghold.checkpoint.load(tmp_path / "saved", model, optimizer, format="dcp") is None
    assert torch.initial_seed() == 7
    assert same(masters_of(model, optimizer), {name: p.detach() for name, p in theirs.named_parameters()})
    assert [group["lr"] for group in optimizer.param_groups] == [2e-3, 5e-4]
    assert [group["betas"] for group in optimizer.param_groups] == [(0.85, 0.99)] * 2
    expected = sharded.train(theirs, adamw, BATCHES[sharded.STEPS :])
    assert sharded.train(model, optimizer, BATCHES[sharded.STEPS :]) == pytest.approx(expected, rel=1e-6)


def test_fsdp_goes_on_from_ours_and_we_from_its_shards(tmp_path: Any) -> None:
    model, optimizer = ours(sharded.plain())
    sharded.train(model, optimizer, BATCHES[: sharded.STEPS])
    stronghold.checkpoint.save(tmp_path / "ours", model, optimizer, format="dcp")
    expected = sharded.train(model, optimizer, BATCHES[sharded.STEPS :])
    found = launch(
        "tests.checkpoint.sharded", "train_save_and_load", 2, tmp_path, str(tmp_path / "saved"), str(tmp_path / "ours")
    )
    for own, after in found:
        assert after == pytest.approx(expected, rel=1e-6)
        assert own == pytest.approx(expected, rel=1e-6)
    stronghold.checkpoint.load(tmp_path / "saved", model, optimizer, format="dcp")
    assert sharded.train(model, optimizer, BATCHES[sharded.STEPS :]) == pytest.approx(found[0][0], rel=1e-6)


@pytest.mark.parametrize(("dtype", "update"), crossed(("fp32", "bf16"), ("deferred", "in_backward"), together=1))
def test_what_follows_is_what_would_have_followed(dtype: str, update: str, tmp_path: Any) -> None:
    case = CASES["gpt"]
    batches = case.batches(5)
    first = Training(case.model(), window=2, update=update, clip=None, dtype=DTYPES[dtype])
    torch.manual_seed(3)
    first.steps(batches[:2])
    path = first.save(tmp_path / "saved", extra={"position": 2}, format="dcp")
    losses = first.steps(batches[2:])
    final = snapshot(first.model, first.optimizer)
    settings = {"window": 1, "store": str(tmp_path / "store"), "resident": 1}
    other = Training(case.model(seed=1), clip=None, dtype=DTYPES[dtype], **settings)
    other.steps(case.batches(1, seed=9))
    torch.manual_seed(99)
    assert other.load(path, format="dcp") == {"position": 2}
    assert other.steps(batches[2:]) == losses
    assert differences(snapshot(other.model, other.optimizer), final) == []


EACH_TIME = ("counting", "stateful", "shared", "frozen", "skipping")
"""Those of the small models whose names or buffers differ most; the others are long."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in EACH_TIME else pytest.mark.long) for name in KINDS if name != "residual"],
)
def test_every_kind_of_model_comes_back(name: str, tmp_path: Any) -> None:
    """Shared weights, frozen ones, buffers that are in no state_dict() and those that are."""
    first, kind = of_kind(name)
    first.steps(kind.batches(2))
    first.save(tmp_path / "saved", format="dcp")
    other, _ = of_kind(name, seed=1)
    other.load(tmp_path / "saved", format="dcp")
    assert same(masters(other), masters(first))
    mine, theirs = dict(other.model.named_buffers()), dict(first.model.named_buffers())
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    keys = dcp.FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    assert {f"model.{key}" for key in kind.build().state_dict()} <= keys.keys()


class _Wrapped(nn.Module):
    """A model in another, of which one part is frozen; its layers' names end as those of the part do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2)).requires_grad_(False)
        self.net = sharded.plain()
        self.norm = nn.BatchNorm1d(6)
        self.same = self.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.same(self.layers[0](x)))


@pytest.mark.parametrize("steps", [0, 2])
def test_names_that_end_alike_and_modules_with_two_names_go_over_and_come_back(steps: int, tmp_path: Any) -> None:
    torch.manual_seed(1)
    model = stronghold.offload(_Wrapped(), device="cpu", window=2, layers="net.layers")
    optimizer = stronghold.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    sharded.train(model, optimizer, BATCHES[:steps])
    stronghold.checkpoint.save(tmp_path / "saved", model, optimizer, format="dcp")
    theirs = _Wrapped()
    adamw = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=1e-3)
    state = states_of(theirs, adamw)
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    set_state_dict(theirs, adamw, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    kept = masters_of(model, optimizer)
    assert all(torch.equal(parameter, kept[name]) for name, parameter in theirs.named_parameters())
    assert adamw.param_groups[0]["lr"] == 1e-2
    sharded.train(theirs, adamw, BATCHES[steps : steps + 1])
    expected = {name: parameter.detach().clone() for name, parameter in theirs.named_parameters()}
    dcp.save(states_of(theirs, adamw), checkpoint_id=tmp_path / "theirs")
    stronghold.checkpoint.load(tmp_path / "saved", model, optimizer, format="dcp")
    assert same(masters_of(model, optimizer), kept)
    stronghold.checkpoint.load(tmp_path / "theirs", model, optimizer, format="dcp")
    assert same(masters_of(model, optimizer), expected)
    assert torch.equal(model.norm.running_mean, theirs.norm.running_mean)


@pytest.mark.parametrize("flat", [False, True])
def test_a_model_that_was_saved_within_another_comes_back(flat: bool, tmp_path: Any) -> None:
    theirs = nn.ModuleDict({"net": sharded.plain()})
    adamw = sharded.adamw(theirs)
    sharded.train(theirs["net"], adamw, BATCHES[:1])
    adamw.param_groups[1]["lr"] = 7e-3
    dcp.save(states_of(theirs, adamw, flatten_optimizer_state_dict=flat), checkpoint_id=tmp_path / "saved")
    model, optimizer = ours(sharded.plain())
    stronghold.checkpoint.load(tmp_path / "saved", model, optimizer, format="dcp")
    assert same(masters_of(model, optimizer), {name: p.detach() for name, p in theirs["net"].named_parameters()})
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 7e-3]
    if flat:
        optimizer = stronghold.AdamW(model.parameters())
        with pytest.raises(CheckpointError, match="got several settings within that of"):
            stronghold.checkpoint.load(tmp_path / "saved", model, optimizer, format="dcp")


def test_eight_bit_moments_become_fp32_ones(tmp_path: Any) -> None:
    first, kind = of_kind(states="8bit")
    first.steps(kind.batches(2))
    saved = first.optimizer.state_dict()["state"]
    first.save(tmp_path / "saved", format="dcp")
    other, _ = of_kind(seed=1)
    other.load(tmp_path / "saved", format="dcp")
    for number, state in other.optimizer.state_dict()["state"].items():
        assert all(torch.equal(state[key], saved[number][key]) for key in state)
    again, _ = of_kind(seed=2, states="8bit")
    with pytest.raises(CheckpointError, match="moments in fp32 do not go into eight bits without loss"):
        again.load(tmp_path / "saved", format="dcp")


def test_one_tensor_is_held_beside_the_model(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.Tensor] = []
    held: list[int] = []
    real = dcp_saving._on_host

    def counted(value: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        held.append(sum(tensor.untyped_storage().nbytes() for tensor in taken))
        taken.append(real(value, source))
        assert taken[-1].data_ptr() != source.data_ptr()
        return taken[-1]

    monkeypatch.setattr(dcp_saving, "_on_host", counted)
    first, kind = of_kind()
    first.steps(kind.batches(1))
    first.save(tmp_path / "saved", format="dcp")
    assert len(taken) == 3 * len(list(first.model.parameters()))
    assert held == [0] * len(taken)


def test_what_several_processes_have_the_first_writes() -> None:
    planners = [dcp_saving._SavePlanner({}), dcp_saving._SavePlanner({})]
    plans = []
    for rank, planner in enumerate(planners):
        shared = {name: torch.full((100,), float(rank)) for name in ("mean", "var", "count")}
        planner.set_up_planner({**shared, f"alone {rank}": torch.zeros(1)}, is_coordinator=rank == 0)
        plans.append(planner.create_local_plan())
    written, _ = planners[0].create_global_plan(plans)
    assert [[item.index.fqn for item in plan.items] for plan in written] == [
        ["mean", "var", "count", "alone 0"],
        ["alone 1"],
    ]


def test_what_is_written_is_synced_on_the_way(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, kind = of_kind()
    first.steps(kind.batches(1))
    lengths, fsync = [0], os.fsync

    def noted(file: int) -> None:
        lengths.append(os.fstat(file).st_size)
        fsync(file)

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", noted)
        patch.setattr("stronghold.checkpoint.dcp_saving._SYNC_BYTES", 20_000)
        first.save(tmp_path / "saved", format="dcp")
    total = (tmp_path / "saved" / "__0_0.distcp").stat().st_size
    until = lengths[: lengths.index(total) + 1]
    assert total > 100_000
    assert all(after - before < 60_000 for before, after in pairwise(until)), until


@pytest.mark.parametrize("at", ["fsync", "write"])
def test_a_full_disk_leaves_nothing(at: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, kind = of_kind()
    first.steps(kind.batches(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is refused

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError) as caught:
        if at == "fsync":
            patch.setattr("os.fsync", full)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        try:
            first.save(tmp_path / "saved", format="dcp")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.errno == (errno.ENOSPC if at == "fsync" else errno.EFBIG)
    assert caught.value.filename.endswith("__0_0.distcp")
    assert list(tmp_path.iterdir()) == []
    first.save(tmp_path / "saved", format="dcp")


def test_an_interrupted_save_leaves_nothing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, kind = of_kind()
    first.steps(kind.batches(1))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dcp_saving, "_on_host", interrupted)
    with pytest.raises(KeyboardInterrupt):
        first.save(tmp_path / "saved", format="dcp")
    assert list(tmp_path.iterdir()) == []


class _Harmful:
    def __reduce__(self) -> Any:
        return (print, ("unpickled",))


def test_what_is_not_such_a_checkpoint_is_refused(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    first, kind = of_kind("residual")
    first.steps(kind.batches(1))
    before = masters(first)

    def refused(message: str, path: Any, **more: Any) -> None:
        with pytest.raises(CheckpointError, match=message):
            first.load(path, format="dcp", **more)

    with pytest.raises(ValueError, match=r"format must be one of 'safetensors', 'dcp' \(got 'zip'\)"):
        first.load(tmp_path, format="zip")
    with pytest.raises(ValueError, match=r"format must be one of 'safetensors', 'dcp' \(got 'zip'\)"):
        first.save(tmp_path / "saved", format="zip")
    refused("could not be read as a checkpoint of torch.distributed.checkpoint.*FileNotFound", tmp_path)
    theirs = Residual()
    adamw = torch.optim.AdamW(theirs.parameters())
    state = states_of(theirs, adamw)
    dcp.save({"model": state["model"]}, checkpoint_id=tmp_path / "weights")
    refused("must have the optimizer's states under the parameters' names", tmp_path / "weights")
    for other in (torch.optim.Adam, torch.optim.NAdam):
        theirs = Residual()
        dcp.save(states_of(theirs, other(theirs.parameters())), checkpoint_id=tmp_path / other.__name__)
        refused("must be of AdamW .*decoupled_weight_decay", tmp_path / other.__name__)
    dcp.save({**state, "ema": {**state["model"]}}, checkpoint_id=tmp_path / "twice")
    refused("the optimizer must have the groups", tmp_path / "twice")  # and "model." is what is loaded
    two = {"one": state["model"], "ema": state["model"], "optimizer": state["optimizer"]}
    dcp.save(two, checkpoint_id=tmp_path / "2")
    refused(r"they are under 'ema\.' and 'one\.'", tmp_path / "2")
    moments = state["optimizer"]["state"]["out.weight"]
    kept = moments["exp_avg_sq"]
    for wrong, message in (
        (kept[:1], r"of shape \[1, 16\]"),
        (kept.double(), r"got torch\.float64"),
        (None, "no tensor"),
    ):
        moments["exp_avg_sq"] = wrong
        dcp.save(state, checkpoint_id=tmp_path / message)
        refused(message, tmp_path / message)
    moments["exp_avg_sq"] = kept
    for record in ("{}", "no JSON", '{"format": 99}'):
        dcp.save({**state, "stronghold": {"manifest": record}}, checkpoint_id=tmp_path / record)
        refused("has been altered|must be of format", tmp_path / record)
    del state["model"]["layers.1.up.bias"]
    dcp.save(state, checkpoint_id=tmp_path / "less")
    refused(r"got no model\.layers\.1\.up\.bias", tmp_path / "less")
    other, _ = of_kind("chain")
    other.save(tmp_path / "chain", format="dcp")
    refused("must have all of the model's parameters once", tmp_path / "chain")
    assert same(masters(first), before)
    path = first.save(tmp_path / "good", format="dcp")
    for file in path.glob("*.distcp"):
        file.unlink()
    refused("could not be (read|loaded)", path)
    shutil.rmtree(path)
    theirs = Residual()
    state = states_of(theirs, torch.optim.AdamW(theirs.parameters()))
    state["optimizer"]["param_groups"][0]["lr"] = _Harmful()
    dcp.save(state, checkpoint_id=tmp_path / "harmful")
    capsys.readouterr()
    refused("(?s)could not be read.*Unsupported global", tmp_path / "harmful")
    assert "unpickled" not in capsys.readouterr().out


def test_a_file_is_on_disk_to_its_end_when_it_is_closed(tmp_path, monkeypatch) -> None:
    """torch syncs that of the metadata while its end is still in a buffer."""
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda one: synced.append(os.fstat(one).st_size) or fsync(one))
    with dcp_saving._Files().create_stream(tmp_path / "file", "wb") as stream:
        stream.write(b"x" * 100)
        os.fsync(stream.fileno())
    assert synced[-1] == os.path.getsize(tmp_path / "file") == 100
