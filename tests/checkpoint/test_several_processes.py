"""All processes of a model save one checkpoint together and load one, each by a path of its own, or are told."""

from __future__ import annotations

import shutil

import pytest
import torch

import stronghold
from stronghold.engine import engine_of, offload_shared
from stronghold.errors import CheckpointError
from stronghold.unit import Replicas
from tests.replicas import in_threads
from tests.small import SIZE, Residual


def trained(one: Replicas, model: torch.nn.Module) -> tuple[torch.nn.Module, stronghold.AdamW]:
    model = offload_shared(model, one, device="cpu", window=1)
    engine_of(model).join(one.everyone, shared={}, copies=(), model="Residual", passes=1, here=2)
    return model, stronghold.AdamW(model.parameters(), lr=1e-2)


def step(model, optimizer, rank: int) -> None:
    model(torch.randn(4, SIZE, generator=torch.Generator().manual_seed(rank))).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_another_checkpoint_in_each_is_refused_and_a_copy_is_not(tmp_path):
    """Each went on from its own: weights are the last one's that loaded, and steps are counted otherwise in each."""
    models = [Residual(), Residual()]

    def run(one: Replicas) -> None:
        model, optimizer = trained(one, models[one.rank])
        for number in (1, 2):
            step(model, optimizer, one.rank)
            stronghold.checkpoint.save(tmp_path / f"step-{number}", model, optimizer)
        values = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(CheckpointError, match=r"step-1 of step 1 in process 0 and .*step-2 of step 2 in process 1"):
            stronghold.checkpoint.load(tmp_path / f"step-{1 + one.rank}", model, optimizer)
        assert all(map(torch.equal, values, model.parameters()))
        step(model, optimizer, one.rank)
        if one.rank:
            shutil.copytree(tmp_path / "step-2", tmp_path / "elsewhere")
        one.everyone.barrier()
        stronghold.checkpoint.load(tmp_path / ("elsewhere" if one.rank else "step-2"), model, optimizer)
        assert all(map(torch.equal, values, model.parameters()))

    in_threads(2, run)


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_a_name_of_its_own_in_each_is_refused(tmp_path, format):
    """The first process's was written alone, and the others were told that theirs is there."""
    models = [Residual(), Residual()]

    def run(one: Replicas) -> None:
        model, optimizer = trained(one, models[one.rank])
        with pytest.raises(
            ValueError, match=r"in one directory, together \(got of-0 in process 0 and of-1 in process 1"
        ):
            stronghold.checkpoint.save(tmp_path / f"of-{one.rank}", model, optimizer, format=format)

    in_threads(2, run)
    assert not list(tmp_path.iterdir())
