"""What benchmarks/methods.py makes of its calls: pairs, memory beyond the bare process, wrong losses, failures."""

import importlib
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def methods(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("methods")


def played(methods, monkeypatch, rates, *, losses=None, failing=()):
    """Has each contender's calls of the rounds end with ``rates`` in turn, the bare one with 1000 bytes of memory."""
    left = {name: iter(found) for name, found in rates.items()}

    def run(name, options, shape):
        if name in failing:
            return "there is no such package"
        bare = shape is methods.SMALLEST
        method = methods.CONTENDERS[name][0]
        return {
            "settings": {"method": method, "dtype": "fp32", "layers": 2, "seed": 0},
            "summary": {"samples_per_s": 1.0 if bare else next(left[name]), "peak_host_bytes": 1000 if bare else 5000},
            "parameters": 100,
            "losses": (losses or {}).get(name, [3.0, 2.0]),
        }

    monkeypatch.setattr(methods, "run", run)


def measured(methods, tmp_path, *only):
    chosen = [word for name in only for word in ("--only", name)]
    code = methods.main(["--rounds", "3", "--out", str(tmp_path / "m.jsonl"), *chosen])
    return code, {r["contender"]: r for r in map(json.loads, (tmp_path / "m.jsonl").read_text().splitlines())}


def test_ratios_are_of_two_calls_of_one_round(methods, monkeypatch, tmp_path):
    played(methods, monkeypatch, {"ordinary loop": [1.0, 2.0, 4.0], "stronghold": [3.0, 2.0, 2.0]})
    code, found = measured(methods, tmp_path, "stronghold")
    assert code == 0
    assert found["stronghold"]["over_ordinary"]["median"] == 1.0
    assert found["stronghold"]["rate"]["median"] == 2.0
    assert (found["stronghold"]["bytes_beyond"], found["stronghold"]["bytes_a_parameter"]) == (4000, 40.0)


def test_wrong_losses_are_told_and_end_with_a_failure(methods, monkeypatch, tmp_path, capsys):
    rates = {"ordinary loop": [1.0] * 3, "stronghold": [1.0] * 3}
    played(methods, monkeypatch, rates, losses={"stronghold": [3.0, 2.1]})
    code, found = measured(methods, tmp_path, "stronghold")
    assert code == 1
    assert "step 2" in found["stronghold"]["wrong"] and not found["ordinary loop"]["wrong"]
    assert "WRONG" in capsys.readouterr().out


def test_one_that_fails_is_a_line_that_says_so(methods, monkeypatch, tmp_path, capsys):
    played(methods, monkeypatch, {"ordinary loop": [1.0] * 3}, failing=("zero-offload",))
    code, found = measured(methods, tmp_path, "zero-offload")
    assert (code, found["zero-offload"]["error"]) == (0, "there is no such package")
    assert "failed: there is no such package" in capsys.readouterr().out


def test_without_the_ordinary_loop_there_is_nothing_to_compare_with(methods, monkeypatch, tmp_path):
    played(methods, monkeypatch, {"stronghold": [1.0] * 3}, failing=("ordinary loop",))
    with pytest.raises(SystemExit, match="no such package"):
        measured(methods, tmp_path, "stronghold")
