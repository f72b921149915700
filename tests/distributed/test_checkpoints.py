"""Checkpoints of stages load in any number of processes, and those of one process in stages, to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

import stronghold
from tests.distributed import saved
from tests.distributed.launched import launch


def alone(states: str):
    model = saved.gpt()
    stronghold.offload(model, device="cpu", window=2, dtype=torch.bfloat16 if states == "8bit" else None)
    return model, saved.optimizer_of(model, states)


def entries(folder) -> dict:
    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: getattr(entry, "size", None) for name, entry in found.items()}


@pytest.mark.parametrize(
    ("states", "format"),
    [
        pytest.param("fp32", "safetensors", marks=pytest.mark.long),
        ("8bit", "safetensors"),
        pytest.param("fp32", "dcp", marks=pytest.mark.long),
        ("muon", "dcp"),
        pytest.param("muon", "safetensors", marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_loads_in_every_layout_to_the_bit(tmp_path, states, format):
    model, optimizer = alone(states)
    saved.train(model, optimizer, slice(0, 3))
    stronghold.checkpoint.save(tmp_path / "alone", model, optimizer, extra={"position": 3}, format=format)
    kept = {"alone": saved.state_of(model, optimizer)}

    ranks = launch("tests.distributed.saved", "save_and_load", 2, tmp_path, str(tmp_path), states, format)
    for source in saved.SAVED:
        kept[source] = {name: tensor for found in ranks for name, tensor in found[f"{source} saved"].items()}
        assert kept[source].keys() == kept["alone"].keys()
        if format == "dcp":
            assert entries(tmp_path / source) == entries(tmp_path / "alone")
    for layout in saved.LAYOUTS:
        for source, expected in kept.items():
            seen = set()
            for found in ranks:
                held = found[f"{layout} of {source}"]
                assert all(torch.equal(tensor, expected[name]) for name, tensor in held.items()), (layout, source)
                seen |= held.keys()
            assert seen == expected.keys()
    for source in saved.SAVED:
        assert all(found[f"{source} of {source}, losses"] == found[f"{source} losses"] for found in ranks)

        model, optimizer = alone(states)
        assert stronghold.checkpoint.load(tmp_path / source, model, optimizer, format=format) == {"position": 3}
        here = saved.state_of(model, optimizer)
        assert here.keys() == kept[source].keys()
        assert all(torch.equal(here[name], kept[source][name]) for name in here), source
