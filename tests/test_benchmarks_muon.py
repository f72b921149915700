"""benchmarks/muon.py: every row is measured, and trains what plain PyTorch trains; muon_overlap.py: by the formula."""

import json
from pathlib import Path

import pytest

from benchmarks import muon


def test_every_way_leaves_a_record_and_the_same_losses(tmp_path, capsys):
    out = tmp_path / "muon.jsonl"
    size = ["--layers", "2", "--hidden", "32", "--samples", "1", "--sequence", "16", "--rounds", "2"]
    muon.main([*size, "--out", str(out)])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["way"] for record in records] == list(muon.ways(2))
    assert all(len(record["seconds"]) == 2 and record["of_plain"] > 0 for record in records)
    assert "window 2, Muon" in capsys.readouterr().out


def test_one_round_has_no_quartiles_and_is_refused(capsys):
    with pytest.raises(SystemExit):
        muon.main(["--rounds", "1"])
    assert "--rounds must be 2 or more, for quartiles (got 1)" in capsys.readouterr().err


def test_an_iteration_takes_the_devices_arithmetic_and_hides_but_for_that(tmp_path, monkeypatch):
    """The formula's FLOPs come on top of AdamW's step, and nothing else does."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    from benchmarks import muon_overlap

    out = tmp_path / "records.jsonl"
    muon_overlap.main(["--layers", "8", "--windows", "2", "--steps", "8", "--out", str(out)])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == 4
    sides = [(1, 3), (1, 1), (1, 4), (1, 4)]
    flops = 5 * sum(4 * short * short * long + 2 * short**3 for short, long in sides) * 2048**3
    for record in records:
        speed = {machine.name: machine.speed for machine in muon_overlap.MACHINES}[record["machine"]]
        more_s = record["muon"]["busy_s"]["compute"] - record["adamw"]["busy_s"]["compute"]
        a_layer_s = flops / speed.flops
        # Of those of 8 steps one step's at most, 8 layers', count before or behind them: one in the mean.
        assert more_s == pytest.approx(8 * a_layer_s, abs=a_layer_s)
        assert record["muon"]["step_s"] <= 1.06 * record["muon"]["busy_s"]["compute"]


@pytest.mark.parametrize("update", [pytest.param("deferred", marks=pytest.mark.long), "in_backward"])
def test_on_a_simulated_h200_a_step_of_adamw_takes_nine_tenths_of_muons(update, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    from benchmarks import muon_overlap

    (machine,) = (machine for machine in muon_overlap.MACHINES if "H200" in machine.name)
    adamw, of_muon = (
        muon_overlap.run(machine, layers=24, window=2, update=update, muon=muon, steps=3) for muon in (False, True)
    )
    assert adamw["step_s"] >= 0.9 * of_muon["step_s"]
    assert of_muon["busy_s"]["compute"] > adamw["busy_s"]["compute"]
