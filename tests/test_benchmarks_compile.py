"""benchmarks/compile.py: its rows, that what it times is compiled where it says so, and comes to the eager losses."""

import importlib
import json
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.parametrize(("activations", "left_out"), [("keep", []), ("recompute", ["offloaded, eager"])])
def test_every_way_is_recorded_and_comes_to_the_eager_losses(activations, left_out, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    compile = importlib.import_module("compile")
    out = tmp_path / "compile.jsonl"
    # Nothing is made but graphs: the benchmark's own calls of torch.compile, too.
    own = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **settings: own(f, **{"backend": "aot_eager", **settings}))
    small = ["--layers", "2", "--hidden", "16", "--batch", "2", "--sequence", "8", "--vocabulary", "17"]
    compile.main(
        [
            *small,
            "--rounds",
            "2",
            "--warm",
            "1",
            "--backend",
            "aot_eager",
            "--out",
            str(out),
            "--activations",
            activations,
            *(option for name in left_out for option in ("--leave-out", name)),
        ]
    )
    torch._dynamo.reset()
    records = {record["way"]: record for record in map(json.loads, out.read_text().splitlines())}
    assert list(records) == [name for name in compile.WAYS if name not in left_out]
    assert all(record["loss_apart"] < 1e-6 for record in records.values())
    assert all(len(record["steps_s"]) == 2 and record["first_step_s"] > 0 for record in records.values())
    assert records[compile.BESIDE]["speed"] == pytest.approx(1)
    assert records["window 2, compiled"]["compiled"] == records["offloaded, compiled"]["compiled"] == 2
    assert records["window 2, eager"]["compiled"] == 0
    assert "window 2, compiled" in capsys.readouterr().out
