"""benchmarks/adamw_triton.py records each setting, and tells of results that are not the host's or not exact."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stronghold import native

MOMENTS = ("exp_avg", "exp_avg_sq")
SCRIPT = Path(__file__).parent.parent / "benchmarks" / "adamw_triton.py"


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("adamw_triton", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]
    sys.path.remove(str(SCRIPT.parent))


def test_every_setting_is_recorded_with_its_distances(tmp_path):
    pytest.importorskip("triton", minversion="3.9", reason="the interpreter's fma rounds once from Triton 3.9 on")
    out = tmp_path / "out.jsonl"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--elements", "1003", "--out", out], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 numbers are not the host's" in done.stdout
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == 40 == len({json.dumps(record["setting"]) for record in records})
    for record in records:
        assert {"host", "commit"} <= record.keys() and record["versions"]["triton"] and record["elements"] == 1003
        eight_bit = record["setting"]["states"] == "8bit"
        assert set(record["differ"].values()) == {0} and len(record["differ"]) == (5 if eight_bit else 3)
        if not eight_bit:
            assert record["ulp"] == record["host_ulp"]
            assert record["ulp"]["weight"] <= 7.5 and max(record["ulp"][name] for name in MOMENTS) <= 1.5
            assert record["torch_ulp"]["weight"] > 1


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_the_host_s_own_step_has_no_distance_and_another_has(benchmark, states):
    setting = benchmark.Setting(states=states)
    same = benchmark.measure(setting, 1003, "cpu", lambda s: native.adamw([s], threads=1))
    assert set(same["differ"].values()) == {0}
    other = benchmark.measure(setting, 1003, "cpu", lambda s: native.adamw([replace(s, lr=2e-2)], threads=1))
    assert other["differ"]["weight"] > 900
    assert {other["differ"][name] for name in other["differ"] if name != "weight"} == {0}
    none = benchmark.measure(setting, 1003, "cpu", lambda s: None)
    assert min(count for name, count in none["differ"].items() if "exponents" not in name) > 300
    if states == "fp32":
        assert max(same["ulp_from_host"].values()) == 0 < max(same["ulp"][name] for name in MOMENTS) <= 1.5
        assert same["ulp"]["weight"] <= 7.5
        assert same["host_ulp"] == same["ulp"]
        assert other["ulp_from_host"]["weight"] > 1000 < other["ulp"]["weight"]
