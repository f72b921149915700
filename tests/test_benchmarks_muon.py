"""benchmarks/muon.py: every row is measured, and trains what plain PyTorch trains."""

import json

from benchmarks import muon


def test_every_way_leaves_a_record_and_the_same_losses(tmp_path, capsys):
    out = tmp_path / "muon.jsonl"
    size = ["--layers", "2", "--hidden", "32", "--samples", "1", "--sequence", "16", "--rounds", "2"]
    muon.main([*size, "--out", str(out)])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["way"] for record in records] == list(muon.ways(2))
    assert all(len(record["seconds"]) == 2 and record["of_plain"] > 0 for record in records)
    assert "window 2, Muon" in capsys.readouterr().out
