"""`stronghold partition`: what its table says, files that come back as they were written, and what it refuses."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import pytest
import torch

from stronghold.distributed.offloaded_layers import offloaded_stages
from stronghold.lab import cli
from stronghold.lab.cli import stages
from stronghold.planner.machine_file import Spread
from stronghold.planner.partition_file import read_partition
from stronghold.planner.stage_costs import LayerCost
from stronghold.units import format_bytes
from tests.planner import machines

TINY = ["-l", "4", "--hidden", "32", "--heads", "2", "--vocabulary", "256", "--seq", "16"]

SHOP = """
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.Linear(8, 2))

words = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16))
number = 3

def linear():
    return nn.Linear(2, 2)
"""


@pytest.fixture(autouse=True)
def shop(tmp_path, monkeypatch):
    """A folder to be in, with a module that is imported from there, and a home in which no machine is kept."""
    (tmp_path / "shop.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "100")
    yield tmp_path
    sys.modules.pop("shop", None)


@pytest.fixture
def measured(monkeypatch):
    """Costs in place of measured ones: four layers of 1, 2, 3 and 6 ms. Returns what would have been measured."""
    calls = []

    def measure(row, inputs, targets, **settings):
        calls.append((row, inputs, targets, settings))
        return [
            LayerCost(
                forward_s=time_s / 3,
                backward_s=2 * time_s / 3,
                weight_bytes=weight_bytes,
                activation_bytes=1024,
                input_bytes=256,
            )
            for time_s, weight_bytes in ((0.001, 2**20), (0.002, 0), (0.003, 0), (0.006, 0))
        ][: len(row.layers)]

    monkeypatch.setattr(stages, "measure", measure)
    return calls


def run(capsys, *arguments):
    assert cli.main(["partition", *arguments, "--device", "cpu"]) == 0
    return capsys.readouterr().out


def rows(shown):
    """Returns the table's cells, line by line, without its head."""
    lines = [line.strip() for line in shown.splitlines()]
    head = next(number for number, line in enumerate(lines) if line.startswith("─"))
    return [re.split(r"  +", line) for line in lines[head + 1 : lines.index("", head)]]


def test_the_table_says_what_each_stage_takes_and_how_far_it_is_from_the_ideal(capsys, measured):
    shown = run(capsys, *TINY, "--stages", "2", "--micro-batches", "2")
    # Stage 0 holds two micro-batches, stage 1 one; and each boundary's input has a buffer for each micro-batch.
    assert rows(shown) == [
        ["0", "3", "0 - 2", "0", "6.00", "1.01 MiB", "0.0 %"],
        ["1", "1", "3 - 3", "0", "6.00", "1.50 KiB", "0.0 %"],
    ]
    assert shown.splitlines()[-3:] == [
        "slowest    stage 0: 6.00 ms for a micro-batch",
        "ideal      6.00 ms, all layers' time divided evenly; the slowest stage takes 0.0 % longer",
        "step       18.0 ms for 2 micro-batches under 1F1B; bubble 33.3 % (simulated, with links that take no time)",
    ]


def test_a_partition_of_ones_own_is_set_beside_the_fastest(capsys, measured):
    shown = run(capsys, *TINY, "--balance", "1,3", "--micro-batches", "2")
    assert [row[1:3] + row[4:5] + row[6:] for row in rows(shown)] == [
        ["1", "0 - 0", "1.00", "90.9 %"],
        ["3", "1 - 3", "11.0", "0.0 %"],
    ]
    assert "slowest    stage 1: 11.0 ms" in shown
    assert "ideal      6.00 ms, all layers' time divided evenly; the slowest stage takes 83.3 % longer" in shown
    assert "fastest    3,1: 6.00 ms for a micro-batch" in shown


def test_the_table_says_how_far_measurements_differ_and_no_cut_is_moved_for_less(capsys, measured, monkeypatch):
    exact = stages.measure
    for part, row, shown_spread in ((0.1, ["3", "1"], "10.0 %"), (1.0, ["2", "2"], "100.0 %")):

        def measure(*arguments, part=part, **settings):
            return [
                replace(
                    cost, forward_measured_s=Spread(cost.forward_s, cost.forward_s, (1 + 3 * part) * cost.forward_s)
                )
                for cost in exact(*arguments, **settings)
            ]

        monkeypatch.setattr(stages, "measure", measure)
        shown = run(capsys, *TINY, "--stages", "2", "--micro-batches", "2")
        assert [cells[1] for cells in rows(shown)] == row
        assert [cells[5] for cells in rows(shown)] == [shown_spread] * 2
        assert f"spread     {shown_spread} of the layers' time, from quartile to quartile of what was measured" in shown


def test_a_stage_recomputes_as_few_layers_as_fit_the_memory_or_as_told(capsys, measured):
    arguments = [*TINY, "--stages", "2", "--balance", "3,1", "--micro-batches", "2"]
    shown = run(capsys, *arguments, "--activations", "recompute")
    assert [row[3:5] for row in rows(shown)] == [["3", "8.00"], ["1", "8.00"]]
    limit = 2**20 + 2 * (2 * 1024 + 256) + 1024 + 2 * 256  # the last one of stage 0 again
    shown = run(capsys, *arguments, "--memory", str(limit), "-o", "partition.json")
    assert [row[3:5] for row in rows(shown)] == [["1", "7.00"], ["0", "6.00"]]
    assert read_partition("partition.json").recomputed == (1, 0)
    refused = refuse(capsys, *arguments, "--memory", "1MiB")
    assert "each stage must fit its memory (stage 0, layers 0 to 2 with 2 micro-batches held, needs" in refused


def test_with_a_window_a_stage_s_bytes_are_its_windows_and_it_waits_for_its_fetches(capsys, measured):
    arguments = [*TINY, "--stages", "2", "--balance", "3,1", "--micro-batches", "2", "--window", "2"]
    shown = run(capsys, *arguments)
    assert "window     of 2, no rates of its machine known" in shown
    offloaded = offloaded_stages(measured[0][0], 2, device=torch.device("cpu"))
    held = [int(offloaded.held_bytes(*ends)) for ends in ((0, 3), (3, 4))]
    # Of activations stage 0 holds two micro-batches, stage 1 one; each has buffers for two inputs.
    assert [row[5] for row in rows(shown)] == [
        format_bytes(held[0] + 2 * 3 * 1024 + 2 * 256),
        format_bytes(held[1] + 1024 + 2 * 256),
    ]
    slot = offloaded.layers[1].slot_bytes
    slow = {**machines.laptop().link, "h2d": machines.about(2 * 4 * slot)}
    machines.laptop(link=slow).write("machine.json")
    shown = run(capsys, *arguments, "--machine", "machine.json")
    assert "window     of 2, rates of a processor" in shown
    # A layer takes a quarter of a second of a link that two processes have in common: stage 0 fetches one each way and
    # three at a step's beginning, stage 1 its only one then, 248 ms more than it computes, in two micro-batches.
    assert [(row[4], row[5]) for row in rows(shown)] == [("750.0", "fetches"), ("130.0", "updates")]
    refused = refuse(capsys, *TINY, "--stages", "2", "--machine", "machine.json")
    assert "pass a window, such as 2, or no machine" in refused


def test_a_step_counts_what_messages_between_processes_take(capsys, measured):
    arguments = [*TINY, "--stages", "2", "--balance", "3,1", "--micro-batches", "2", "--window", "2"]
    quick = machines.about(1e15)
    rates = {**machines.laptop().link, "h2d": quick}
    # A link carries one message at a time: two there, and the last one's gradient back.
    for processes, step in (({}, "18.0 ms"), ({"message_s": machines.about(1.0), "bytes_per_s": quick}, "3.01 s")):
        machines.laptop(link=rates, processes=processes).write("machine.json")
        shown = run(capsys, *arguments, "--machine", "machine.json")
        assert f"step       {step} for 2 micro-batches under 1F1B" in shown
        assert ("up to 1.00 s to the next stage" if processes else "with links that take no time") in shown


def test_several_stages_of_a_process_are_told_apart(capsys, measured):
    shown = run(capsys, *TINY, "--stages", "4", "--processes", "2")
    assert [row[:2] for row in rows(shown)] == [["0", "0"], ["1", "1"], ["2", "0"], ["3", "1"]]
    assert "16 micro-batches under Interleaved1F1B" in shown


def test_what_is_measured_is_one_micro_batch(capsys, measured):
    run(capsys, *TINY, "--stages", "2", "--batch", "12", "--micro-batches", "4", "--dtype", "bf16")
    run(capsys, *TINY, "--stages", "3", "--batch", "10")
    run(capsys, *TINY, "--stages", "3")
    run(capsys, "shop:net", "--input", "3,8,8", "--stages", "2", "--balance", "1,2", "--batch", "8")
    shapes = [tuple(inputs.shape) for _, inputs, _, _ in measured]
    assert shapes == [(3, 16), (1, 16), (1, 16), (1, 3, 8, 8)]
    (row, ids, targets, settings), *_, (own, numbers, no_targets, _) = measured
    assert ids.dtype == torch.int64 and int(ids.max()) < 256 and targets is ids and settings["dtype"] == torch.bfloat16
    assert len(row.layers) == 4 and all(parameter.is_meta for parameter in row.model.parameters())
    assert len(own.layers) == 3 and own.model.training and numbers.dtype == torch.float32 and no_targets is None


def test_a_file_is_written_and_judged(capsys, shop):
    shown = run(capsys, *TINY, "--stages", "2", "--activations", "recompute", "-o", "partition.json")
    assert "written    partition.json" in shown
    written = json.loads((shop / "partition.json").read_text())
    assert written["recompute_ratio"] == [1, 1] and sum(written["partition"]) == 4
    judged = run(capsys, *TINY, "--file", "partition.json", "-o", "again.json")
    assert [int(row[1]) for row in rows(judged)] == written["partition"]
    assert [int(row[3]) for row in rows(judged)] == written["partition"]
    assert "fastest    " in judged
    assert json.loads((shop / "again.json").read_text()) == written
    assert "a number of layers for each stage" in refuse(capsys, *TINY, "--file", "partition.json", "--stages", "3")


@pytest.mark.parametrize(("model", "sample", "layers"), [("shop:net", "3,8,8", 3), ("shop:words", "7", 2)])
def test_a_model_of_ones_own_is_measured(capsys, model, sample, layers):
    shown = run(capsys, model, "--input", sample, "--stages", "2", "--balance", "memory")
    assert re.search(rf"^model      {model}: {layers} layers, ", shown, flags=re.MULTILINE)
    assert "without a loss, fp32 on cpu" in shown
    assert sum(int(row[1]) for row in rows(shown)) == layers
    assert all(re.fullmatch(r"\d+\.\d+", row[4]) for row in rows(shown))


def refuse(capsys, *arguments):
    """Returns the one line with which ``arguments`` are refused, with exit code 2 and nothing else."""
    try:
        code = cli.main(["partition", *arguments, *([] if "--device" in arguments else ["--device", "cpu"])])
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert error.startswith("stronghold: error: ") and error.count("\n") == 1
    assert code == 2
    return error


OWN = ("shop:net", "--input", "3,8,8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (TINY, "cut into a number of stages (got none); pass --stages"),
        ([*TINY, "--stages", "5"], "each stage needs at least one layer (got stages=5, layers=4); pass at most 4"),
        ([*TINY, "--stages", "0"], "stages must be 1 or more (got 0)"),
        ([*TINY, "--balance", "2,3"], "must sum to the number of layers (got [2, 3], which sum to 5, layers=4)"),
        ([*TINY, "--balance", "2,2", "--stages", "3"], "a number of layers for each stage (got 2 in [2, 2], stages=3)"),
        ([*TINY, "--balance", "quick"], "must be time, memory, or numbers such as 26,23 (got 'quick')"),
        ([*TINY, "--balance", "3,x"], "must be time, memory, or numbers such as 26,23 (got '3,x'); see stronghold"),
        ([*TINY, "--stages", "2", "--schedule", "nonsense"], "--schedule: invalid choice: 'nonsense' (choose from"),
        ([*TINY, "--stages", "2", "--memory", "much"], "'much'"),
        ([*TINY, "--stages", "2", "--batch", "5", "--micro-batches", "2"], "a batch of 5 samples and 2 micro-batches"),
        ([*TINY, "--stages", "4", "--micro-batches", "2"], "1F1B needs at least as many micro-batches as stages"),
        ([*TINY, "--stages", "4", "--processes", "3"], "must divide the stages (got 3 for 4 stages)"),
        ([*TINY, "--stages", "2", "--device", "mars"], "device must be cpu, cuda or cuda:N (got 'mars')"),
        ([*TINY, "--file", "absent.json"], "'absent.json' is no partition"),
        ([*TINY, "--file", "p.json", "--balance", "time"], "got file='p.json' with balance='time'"),
        ([*TINY, "--stages", "2", "-o", "no/where.json"], "output must be a file in a folder that is there"),
        ([*TINY, "--stages", "2", "--input", "3"], "needs the shape of a sample, and the reference GPT has its own"),
        (["shop:net", "--stages", "2"], "needs the shape of a sample"),
        ([*OWN, "--stages", "2", "-l", "3"], "has its own shape (got shop:net with --layers)"),
        (["shop:net", "--input", "3,9,9", "--stages", "2"], "each layer must compute what the one before it returns"),
        (["shop:net", "--input", "3,x", "--stages", "2"], "must be numbers such as 26,23 (got '3,x')"),
        (["shop:nothing", "--input", "3", "--stages", "2"], "must be module:attribute (got 'shop:nothing', and: "),
        (["nowhere:x", "--input", "3", "--stages", "2"], "must be module:attribute (got 'nowhere:x', and: No module"),
        (["shop:number", "--input", "3", "--stages", "2"], "stages are cut out of an nn.Sequential, or what"),
        (["shop:linear", "--input", "3", "--stages", "2"], "(got Linear from 'shop:linear')"),
        ([".", "--input", "3", "--stages", "2"], "folders of transformers models cannot be cut into stages"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(capsys, arguments, message):
    assert message in refuse(capsys, *arguments)


def test_more_stages_than_layers_are_refused_before_it_says_that_anything_is_measured(capsys):
    assert cli.main(["partition", *TINY, "--stages", "5", "--device", "cpu"]) == 2
    assert capsys.readouterr().out == ""
