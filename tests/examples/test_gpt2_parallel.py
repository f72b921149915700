"""examples/gpt2_parallel: GPT-2 in one process, by data parallelism and in stages, in a small setting."""

from __future__ import annotations

import importlib.util
import io
import json
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from functools import partial

import pytest
import torch
import transformers

from stronghold.lab.data.batches import Batches
from stronghold.lab.data.text import read_documents
from stronghold.lab.data.tokens import ByteTokenizer, tokenize
from tests.distributed import launched
from tests.examples.started import EXAMPLES, lines_of_tables

PROGRAMS, BY = EXAMPLES / "gpt2_parallel", "--nproc-per-node"
SHAPE = {"layers": 2, "hidden": 32, "heads": 2, "sequence": 32}
BATCH, WARMUP, STEPS, LR = 4, 1, 3, 1e-3
PROCESSES = {"one process": 1, "data parallelism": 2, "stages without micro-batches": 2, "stages": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gpt2")


@pytest.fixture(scope="module")
def text(folder):
    path = folder / "text.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}, says line {i}.\n" for i in range(200)))
    return path


@pytest.fixture(scope="module")
def measured(folder, text):
    """Returns what the program printed, and its records."""
    arguments = [
        *(f"--{name}={value}" for name, value in SHAPE.items()),
        *(f"--batch={BATCH}", "--micro-batches=2", f"--warmup={WARMUP}", f"--steps={STEPS}", f"--lr={LR}"),
        *("--text", text, "--rounds=1", "--no-all-cores", "--out", folder / "runs.jsonl"),
    ]
    torchrun, standard_output = subprocess.run, io.StringIO()

    def started(command, **settings):
        """Has torchrun start one process, and others as it does, but warm."""
        program, processes = command.index(str(PROGRAMS / "train.py")), int(command[command.index(BY) + 1])
        if processes == 1:
            return torchrun(command, **settings)
        codes, said = launched.start(command[program:], processes, folder, launcher=True)
        return subprocess.CompletedProcess(command, int(any(codes)), "".join(said))

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(standard_output):
        patch.setenv("COLUMNS", "120")
        patch.setattr(subprocess, "run", started)
        run_here(patch, "compare.py", *arguments)
    done = standard_output.getvalue()
    return done, [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def model():
    specification = importlib.util.spec_from_file_location("model", EXAMPLES / "gpt2_parallel" / "model.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ordinary_losses(model, text):
    """Returns what transformers' own model loses, step by step, in the ordinary loop."""
    tokenizer = ByteTokenizer()
    batches = Batches(tokenize(read_documents(text), tokenizer), batch=BATCH, sequence=SHAPE["sequence"])
    torch.manual_seed(0)
    whole = transformers.GPT2LMHeadModel(model.config(**SHAPE, vocabulary=tokenizer.ids))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=LR)
    losses = []
    for step in range(WARMUP + STEPS):
        loss = whole(input_ids=batches[step], labels=batches[step]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_row_is_transformers_model(model):
    settings = model.config(**SHAPE, vocabulary=257)
    torch.manual_seed(0)
    whole = transformers.GPT2LMHeadModel(settings)
    torch.manual_seed(0)
    row = model.gpt2(settings)
    tokens = torch.randint(257, (2, 32), generator=torch.Generator().manual_seed(1))
    expected = whole(input_ids=tokens, labels=tokens)
    torch.testing.assert_close(row(tokens), expected.logits)
    assert model.loss(row(tokens), tokens).item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert row[-1].scores.weight is row[0].tokens.weight
    assert sum(p.numel() for p in row.parameters()) == sum(p.numel() for p in whole.parameters())


@pytest.mark.parametrize("way", PROCESSES)
def test_every_way_is_the_same_training(measured, ordinary_losses, way):
    (record,) = (record for record in measured[1] if record["way"] == way)
    assert record["losses"] == pytest.approx(ordinary_losses, rel=1e-5)
    assert record["losses"][-1] < record["losses"][0]


@pytest.mark.parametrize("way", PROCESSES)
def test_time_is_the_mean_over_ranks_and_tokens_are_their_sum(measured, way):
    (record,) = (record for record in measured[1] if record["way"] == way)
    ranks = record["ranks"]
    assert len(ranks) == record["processes"] == record["stages"] * record["replicas"] == PROCESSES[way]
    assert record["micro_batches"] == (2 if way == "stages" else 1)
    assert record["training_seconds"] == pytest.approx(sum(rank["training_seconds"] for rank in ranks) / len(ranks))
    assert record["tokens_per_second"] == pytest.approx(sum(rank["tokens_per_second"] for rank in ranks))
    tokens = [rank["tokens_per_second"] * rank["training_seconds"] for rank in ranks]
    whole = STEPS * BATCH * SHAPE["sequence"]
    assert tokens == pytest.approx(
        {"one process": [whole], "data parallelism": [whole / 2, whole / 2]}.get(way, [0, whole])  # the last stage's
    )
    assert record["versions"]["torch"] == torch.__version__
    assert record["host"]["cores"] >= 1
    assert "commit" in record


def test_the_ways_are_set_beside_one_another(measured):
    text, records = measured
    assert lines_of_tables(text) == [
        [
            record["way"],
            str(record["processes"]),
            str(record["processes"]),
            *[f"{record['training_seconds']:.3f}"] * 3,
            f"{record['tokens_per_second']:,.0f}",
            f"{max(abs(a - b) / b for a, b in zip(record['losses'], records[0]['losses'], strict=True)):.1e}",
        ]
        for record in records
    ]


@pytest.mark.parametrize(
    ("comparison", "ways"),
    [
        ("data_parallelism", ["one process", "data parallelism"]),
        ("stages", ["one process", "stages without micro-batches", "stages"]),
    ],
)
@pytest.mark.parametrize(
    ("quantity", "label"), [("training_seconds", "training time (s)"), ("tokens_per_second", "tokens per second")]
)
def test_two_figures_are_drawn_of_each_comparison(measured, folder, comparison, ways, quantity, label):
    figure = folder / f"runs_{comparison}_{quantity}"
    assert figure.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    drawn = figure.with_suffix(".svg").read_text()
    assert label in drawn
    assert drawn.count(">1 core<") == 1
    assert drawn.count("processes, 2 cores<") == len(ways) - 1
    for record in measured[1]:
        value = record[quantity]
        if record["way"] in ways:
            assert (f">{value:.2f}<" if value < 100 else f">{value:,.0f}<") in drawn


def test_what_cannot_be_compared_is_refused(measured, folder, monkeypatch, capsys):
    refused = partial(refusal_of, monkeypatch, capsys)
    assert "--out must be a new file" in refused("compare.py", "--out", folder / "runs.jsonl")
    assert "--rounds 1 or more (got 2 and 0)" in refused("compare.py", "--rounds", 0)
    assert "stages takes two processes or more of torchrun (got 0)" in refused("train.py", "stages")
    assert "start it with torchrun --nproc-per-node 1" in refused("train.py", "one-process")
    records = (folder / "runs.jsonl").read_text().splitlines(keepends=True)
    (folder / "three.jsonl").write_text("".join(records[:3]))
    assert "got none by stages)" in refused("draw.py", folder / "three.jsonl")
    (folder / "other.jsonl").write_text("".join([*records, records[0].replace('"batch": 4', '"batch": 8')]))
    assert "must have the same batch (they differ)" in refused("draw.py", folder / "other.jsonl")


def run_here(patch, program, *arguments):
    patch.syspath_prepend(PROGRAMS)
    patch.setattr(sys, "argv", [str(PROGRAMS / program), *map(str, arguments)])
    for name in ("model", "draw"):
        patch.delitem(sys.modules, name, raising=False)  # another example's
    runpy.run_path(str(PROGRAMS / program), run_name="__main__")


def refusal_of(monkeypatch, capsys, program, *arguments):
    """Returns what a program says that refuses; here, since to start one takes seconds."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as refusal:
        run_here(patch, program, *arguments)
    assert refusal.value.code == 2
    return " ".join(capsys.readouterr().err.split())
