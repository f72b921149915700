"""examples/digits: the same training with and without stages, and what each stage takes."""

from __future__ import annotations

import json

import pytest

from tests.examples.started import lines_of_tables, printed, printed_by, start

SMALL = ("--epochs", 2, "--width", 16)
PARAMETERS = 50_874


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("digits")


@pytest.fixture(scope="module")
def runs(folder):
    """Returns what the ordinary run and two with stages printed, and their records."""
    out = ("--out", folder / "runs.jsonl")
    texts = [
        printed("digits/ordinary.py", *SMALL, *out),
        printed_by(2, "digits/stages.py", *SMALL, *out, "--balance", "time"),
        printed_by(2, "digits/stages.py", *SMALL, *out, "--balance", "memory", "--micro-batches", 2),
    ]
    return texts, [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]


def test_it_learns_to_read(runs):
    (text, *_), (ordinary, *_) = runs
    assert len(ordinary["losses"]) == 2 * (1437 // 64)
    assert ordinary["losses"][-1] < 0.7 * ordinary["losses"][0]
    assert ordinary["accuracies"][-1] > 0.5
    lines = text.splitlines()
    assert [line[:10] for line in lines] == ["epoch  1/2", "epoch  2/2"]
    assert f"loss {ordinary['losses'][-1]:.4f}" in lines[1]
    assert f"{ordinary['accuracies'][-1]:.1%} right" in lines[1]


@pytest.mark.parametrize(("number", "balance", "micro_batches"), [(1, "time", 4), (2, "memory", 2)])
def test_with_stages_it_is_the_same_training(runs, number, balance, micro_batches):
    ordinary, staged = runs[1][0], runs[1][number]
    assert (staged["stages"], staged["balance"], staged["micro_batches"]) == (2, balance, micro_batches)
    assert staged["losses"] == pytest.approx(ordinary["losses"], abs=1e-5)
    assert staged["tested_losses"] == pytest.approx(ordinary["tested_losses"], abs=1e-5)
    assert staged["accuracies"] == ordinary["accuracies"]


@pytest.mark.parametrize("number", [1, 2])
def test_each_stage_says_what_it_takes(runs, number):
    text, stages = runs[0][number], runs[1][number]["memory"]
    assert sum(stage["layers"] for stage in stages) == 7
    assert sum(stage["parameters"] for stage in stages) == PARAMETERS
    for stage in stages:
        assert 16 * stage["parameters"] <= stage["held"] < 1.1 * 16 * stage["parameters"]  # weight, gradient, moments
        assert 2**27 < stage["resident"] < 2**31  # PyTorch with it
    table = lines_of_tables(text)
    assert [line[:3] for line in table] == [
        [str(place), str(stage["layers"]), f"{stage['parameters']:,}"] for place, stage in enumerate(stages)
    ]
    assert text.count("images/s") == 2  # one process speaks


def test_runs_are_set_beside_one_another(runs, folder):
    lines = lines_of_tables(printed("digits/compare.py", folder / "runs.jsonl", "-o", folder / "losses.png"))
    assert [line[0] for line in lines] == [
        "without stages", "2 stages by time, 4 micro-batches", "2 stages by memory, 2 micro-batches",
    ]  # fmt: skip
    for line, run in zip(lines, runs[1], strict=True):
        assert line[2:5] == [
            f"{run['images_per_second']:,.0f}", f"{run['losses'][-1]:.6f}", f"{run['accuracies'][-1]:.1%}",
        ]  # fmt: skip
        furthest = max(abs(ours - first) for ours, first in zip(run["losses"], runs[1][0]["losses"], strict=True))
        assert float(line[5]) == pytest.approx(furthest, rel=0.1)
    assert (folder / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_stages_alone_are_refused():
    code, said = start("digits/stages.py")
    assert code == 2
    assert "start it with torchrun --nproc-per-node 2" in said
