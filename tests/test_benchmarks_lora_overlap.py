"""benchmarks/lora_overlap.py: its bound, what its device charges, and that the engine's steps and plans are close."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def lora_overlap(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("lora_overlap")


@pytest.mark.parametrize(
    ("fetch_s", "window", "least_s"),
    [
        (0.5, 2, 18),  # the link is faster than both passes: all is computation
        (1.5, 2, 8 + 12),  # between them: 4 fetches and what is computed at a pass's ends, 6 + 2; and 6 layers of 2 s
        (4, 2, 18 + 20),  # slower than both: 16 + 2 forward and 16 + 4 backward
        (4, 6, 18),  # all layers have a slot
        (4, 1, 18 + 40),
    ],
)
def test_the_least_that_a_step_can_take(lora_overlap, fetch_s, window, least_s):
    assert lora_overlap.least_s([1] * 6, [2] * 6, fetch_s, streamed=6, window=window) == least_s


@pytest.mark.parametrize(
    ("base", "samples", "activations", "longest"),
    [
        pytest.param("bf16", 1, "recompute", "fetches", marks=pytest.mark.long),
        ("bf16", 8, "keep", "fetches"),
        ("nf4_nested", 6, "recompute", "compute"),
    ],
)
def test_a_step_is_at_its_bound_and_as_planned(lora_overlap, base, samples, activations, longest):
    player = replace(lora_overlap.PLAYERS[1], layers=12)
    settings = {"window": 2, "resident": 0, "activations": activations, "micro_batch": None}
    record = lora_overlap.measure(player, base, samples=samples, steps=1, **settings)
    elements, speed = 12 * player.width**2, player.machine.speed
    # Adapters add a ninetieth to each pass, and their own gradients as much to the backward pass.
    passes, tokens = 3 if activations == "recompute" else 2, 512 * samples
    computed_s = passes * 12 * 2 * elements * tokens / speed.flops
    assert 1.0 <= record["busy_s"]["compute"] / computed_s <= 1.03
    # In four bits: half a byte, a byte of scale for 64 elements, and 4 bytes for 256 of those; and of each of four
    # weights up to 64 bytes behind four tensors, which in layers as small as those that are played count.
    weight_bytes = {"bf16": 2, "nf4_nested": 1 / 2 + 1 / 64 + 4 / (64 * 256)}[base]
    between = {"bf16": 0, "nf4_nested": 4 * 4 * 64 / (12 * 128**2)}[base]
    fetched_s = 2 * 10 * elements / speed.up
    assert fetched_s * weight_bytes <= record["busy_s"]["fetches"] * (1 + 1e-9)
    assert record["busy_s"]["fetches"] <= fetched_s * (weight_bytes + between) * (1 + 1e-9)
    assert record["longest"] == longest
    assert -1e-9 <= record["over_least"] <= 0.01
    assert abs(record["over_planned"]) <= 0.01


def test_what_is_planned_is_played_and_recorded(lora_overlap, tmp_path, capsys, monkeypatch):
    out = tmp_path / "records.jsonl"
    monkeypatch.setattr(lora_overlap, "PLAYERS", [replace(lora_overlap.PLAYERS[0], device_bytes=2**34)] * 2)
    monkeypatch.setattr(lora_overlap, "GIVEN", [{}])
    arguments = ["--layers", "6", "12", "--bases", "bf16", "--samples", "2", "--out", str(out)]
    lora_overlap.main(arguments)
    resident, streamed = (json.loads(line) for line in out.read_text().splitlines())
    assert resident["busy_s"]["fetches"] == 0 < streamed["busy_s"]["fetches"]
    for record in (resident, streamed):
        assert record["chosen_by_plan"]
        assert record["over_least"] >= -1e-9
        assert abs(record["over_planned"]) <= 0.03
    assert "planned: window" in capsys.readouterr().out


@pytest.mark.parametrize(("samples", "longest"), [(1, "fetches"), pytest.param(32, "compute", marks=pytest.mark.long)])
def test_where_link_or_computation_is_the_longest_a_step_is_within_three_percent_of_it(lora_overlap, samples, longest):
    player = replace(lora_overlap.PLAYERS[1], layers=32)
    outcome, _ = lora_overlap.run(player, "bf16", samples=samples, steps=1, window=2)
    assert outcome.longest == longest
    assert 1 - 1e-9 <= outcome.ratio <= 1.03
