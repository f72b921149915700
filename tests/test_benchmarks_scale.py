"""benchmarks/scale.py: a step counted by hand, what is left out, and that its defaults end within seconds."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def scale(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("scale")


def recorded(scale, tmp_path, *arguments):
    out = tmp_path / "scale.jsonl"
    scale.main([*arguments, "--out", str(out)])
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


SMALL = ("--models", "8x128", "--batch", "16", "--sequence", "64", "--schedules", "1F1B", "--layouts", "2x2")
LAYER, ROOT = 12 * 128**2 + 13 * 128, 51_328 * 128  # parameters; 51,201 rows are padded to 51,328
LAYER_FLOPS = 24 * 64 * 128**2 + 4 * 64**2 * 128
HEAD_FLOPS = 2 * 64 * ROOT


def test_a_step_by_hand(scale, tmp_path):
    """The head takes longer than all layers: seven on the first stage, one on the second, at one MFLOP/s."""
    (found,) = recorded(scale, tmp_path, *SMALL, "--tflops", "1e-6")
    assert (found["parameters"], found["partition"], found["micro_batches"]) == (8 * LAYER + ROOT + 256, [7, 1], 8)
    first_s, last_s = 7 * LAYER_FLOPS / 1e6, (LAYER_FLOPS + HEAD_FLOPS) / 1e6  # forward; backward three times that
    assert found["step_s"] == pytest.approx(4 * first_s + 8 * 4 * last_s, rel=1e-9)
    assert found["bubble"] == pytest.approx(1 - 8 * 4 * (first_s + last_s) / (2 * found["step_s"]), rel=1e-9)
    assert found["of_flops"] == pytest.approx(3 / 4 * (1 - found["bubble"]), rel=1e-9)
    assert (found["longest"], found["update_s"]) == ("compute", 0)
    assert found["stage_link_bytes"] == 8 * 64 * 128 * 2
    # the first of 16 passes fetches seven layers, the others three: half from either replica's host
    assert found["host_up_bytes"] == (7 + 15 * 3) * LAYER + ROOT
    assert found["host_down_bytes"] == 8 * (7 * LAYER + ROOT)
    assert found["replica_link_bytes"] == found["host_up_bytes"] + found["host_down_bytes"]
    assert found["host_bytes"] == 16 * (8 * LAYER + 2 * ROOT)  # all four devices are on one node
    assert found["activation_bytes"] == (2 * 7 + 17) * 64 * 128 * 2  # two micro-batches held, one layer recomputed


def test_gradients_that_are_summed_on_the_device_leave_it_once(scale, tmp_path):
    (found,) = recorded(scale, tmp_path, *SMALL, "--tflops", "1e-6", "--reduce", "step")
    assert found["host_down_bytes"] == 7 * LAYER + ROOT
    assert found["replica_link_bytes"] == found["host_up_bytes"] + found["host_down_bytes"]
    assert found["host_bytes"] == 14 * (8 * LAYER + 2 * ROOT)


@pytest.mark.parametrize(
    ("slow", "longest", "forward_s", "backward_s", "update_s"),
    [
        # 8 + 15 · 4 fetches in 16 passes; gradients go down while weights come up
        ("--host-link", "host link", 4.25 * LAYER, 8 * LAYER + ROOT, 0),
        # both one way
        ("--node-link", "replicas", 4.25 * LAYER, 4.25 * LAYER + 8 * LAYER + ROOT, 0),
        # an eighth of the node's memory for each device
        ("--host-memory", "host memory", 0, 8 * 10 * (4 * LAYER + ROOT / 2), 8 * 28 * (4 * LAYER + ROOT / 2)),
    ],
)
def test_what_is_slow_is_what_a_pass_takes(scale, tmp_path, slow, longest, forward_s, backward_s, update_s):
    """One stage of eight layers on two replicas, a window of four; at a byte a second every share takes its bytes."""
    fast = ("--tflops", "1e12", "--host-link", "1000PB/s", "--node-link", "1000PB/s", "--host-memory", "1000PB/s")
    (found,) = recorded(scale, tmp_path, *SMALL, "--layouts", "1x2", *fast, slow, "1B/s")
    assert found["longest"] == longest
    assert found["update_s"] == pytest.approx(update_s, rel=1e-6)
    assert found["step_s"] == pytest.approx(8 * (forward_s + backward_s) + update_s, rel=1e-6)


def test_what_cannot_be_is_left_out_and_said(scale, tmp_path, capsys):
    assert recorded(scale, tmp_path, *SMALL, "--layouts", "16x1", "2x3", "4x8") == []
    said = capsys.readouterr().out
    assert "left out: 8 layers, 1F1B, 16 x 1: each stage needs a layer (got stages=16, layers=8)" in said
    assert "2 x 3: replicas · micro_batch must divide the batch (got replicas=3, micro_batch=1, batch=16)" in said
    assert "4 x 8: 1F1B needs at least as many micro-batches as stages (got micro_batches=2, stages=4)" in said


def test_the_defaults(scale, tmp_path):
    found = recorded(scale, tmp_path)
    assert {(round(x["parameters"] / 1e9), x["layers"]) for x in found} == {(70, 86), (407, 126), (1008, 128)}
    assert max(x["devices"] * x["replicas"] for x in found) == 1024
    for x in found:
        assert sum(x["partition"]) == x["layers"] and 0 < x["bubble"] < 1 and 0 < x["of_flops"] < 3 / 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "argument --batch: must be a whole number of at least 1 (got '0')"),
        (["--layouts", "8by8"], "argument --layouts: must be a whole number of at least 1 (got '8by8')"),
        (["--network", "fast"], "argument --network: a size must be one number and one unit (got 'fast')"),
        (["--tflops", "0"], "argument --tflops: must be above 0 (got '0')"),
    ],
)
def test_options_that_are_refused(scale, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit):
        scale.main([*arguments, "--out", str(tmp_path / "scale.jsonl")])
    assert message in capsys.readouterr().err
