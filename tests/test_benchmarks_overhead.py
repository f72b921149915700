"""benchmarks/overhead.py: its rows, and that what it times is the engine at work."""

import importlib
import json
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def overhead(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    threads = torch.get_num_threads()
    yield importlib.import_module("overhead")
    torch.set_num_threads(threads)


def test_every_way_is_recorded_with_one_backward_pass_and_with_two(overhead, tmp_path, capsys):
    out = tmp_path / "overhead.jsonl"
    overhead.main(["--layers", "2", "--rounds", "1", "--steps", "2", "--out", str(out)])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    ways = [(record["way"], record["backwards"]) for record in records]
    assert ways == [(way, backwards) for backwards in (1, 2) for way in overhead.settings_of(2)]
    for record in records:
        assert all(0 < record["seconds_a_layer"][which] < 1 for which in overhead.PASSES)
    assert "streamed, recomputed" in capsys.readouterr().out


@pytest.mark.parametrize("way", ["plain PyTorch", "resident, kept", "streamed, kept", "streamed, recomputed"])
def test_what_is_timed_trains(overhead, way):
    torch.manual_seed(0)
    model, optimizer = overhead.build(2, overhead.settings_of(2)[way])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    overhead.measure(model, optimizer, steps=1, backwards=2)
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert sum(changed) > len(changed) / 2  # those of the last norm's sum have gradients of zero
    assert all(parameter.grad is None for parameter in model.parameters())
