"""benchmarks/states.py runs and draws, says what its records say, and 8-bit training goes on where it stopped."""

import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import stronghold
from stronghold.lab.models.gpt import GPT, GPTConfig

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "states.py"


@pytest.fixture(scope="module")
def states():
    spec = importlib.util.spec_from_file_location("states_benchmark", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def call(*arguments):
    # threads that spin while they wait would take minutes on a machine with other work to do
    environment = {"GOMP_SPINCOUNT": "1000", **os.environ}
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)


@pytest.mark.parametrize("numbers", [(0, 3), pytest.param((0, 1, 2, 3), marks=pytest.mark.long)])
def test_the_quick_run_records_every_step_of_every_run_and_draws_them(states, tmp_path, numbers):
    chosen = ("--cases", *map(str, numbers))
    done = call("--quick", *chosen, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "states.jsonl").read_text().splitlines()]
    cases = [("gpt", "bf16", 0.95), ("gpt", "bf16", 0.999), ("llama", "fp32", 0.95), ("llama", "fp32", 0.999)]
    variants = ("fp32", "8bit", "control", "8bit-control")
    expected = [(*cases[number], variant) for number in numbers for variant in variants]
    settings = [record["settings"] for record in records]
    assert [
        (s["model"], s["dtype"], s["betas"][1], r["variant"]) for s, r in zip(settings, records, strict=True)
    ] == expected
    for number in range(0, len(records), 4):
        fp32, narrow, control, other = records[number : number + 4]
        assert fp32["losses"][0] == narrow["losses"][0]  # the same weights, the same batch
        assert fp32["losses"] != narrow["losses"]
        assert fp32["losses"] != control["losses"]
        assert control["losses"][0] == other["losses"][0] != fp32["losses"][0]
        assert control["losses"] != other["losses"]
        for record in (fp32, narrow, control, other):
            assert len(record["losses"]) == 12
            assert record["losses"][-1] < record["losses"][0]
            assert [evaluation["step"] for evaluation in record["held_out"]] == [4, 8, 12]
            assert record["commit"] is None or len(record["commit"]) >= 40
            assert {"host", "versions", "threads", "time", "training_s", "parameters"} <= record.keys()
        assert [r["states"] for r in (fp32, narrow, control, other)] == ["fp32", "8bit", "fp32", "8bit"]
        assert 8.0 <= fp32["states_bytes_per_parameter"] < 8.1
        assert 2.0 + 2 / 64 <= narrow["states_bytes_per_parameter"] < 2.2  # tiny layers pay for alignment
        saved = fp32["host_bytes_per_parameter"] - narrow["host_bytes_per_parameter"]
        assert saved == pytest.approx(8 - 2 - 2 / 64, abs=0.2)
    assert "kept" in done.stdout
    assert (tmp_path / "states.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "states.svg").read_text()
    assert "<svg" in drawn

    (tmp_path / "states.svg").unlink()
    assert states.main(["--quick", "--draw-only", *chosen, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "states.svg").read_text() == drawn
    assert len((tmp_path / "states.jsonl").read_text().splitlines()) == len(expected)


def record(variant, losses, held_out, *, beta2=0.95):
    return {
        "variant": variant,
        "settings": {"model": "gpt", "dtype": "bf16", "betas": [0.9, beta2], "steps": len(losses)},
        "losses": losses,
        "held_out": [{"step": step, "loss": loss} for step, loss in held_out],
    }


def test_differences_are_those_of_all_means_of_fifty_steps_and_of_held_out_losses(states):
    generator = np.random.default_rng(0)
    reference, ours = generator.uniform(1, 2, (2, 160))
    found = states.difference(
        record("8bit", ours.tolist(), [(80, 1.5), (160, 0.999)]),
        record("fp32", reference.tolist(), [(80, 1.0), (160, 1.0)]),
    )
    expected = np.convolve(ours, np.ones(50), "valid") / np.convolve(reference, np.ones(50), "valid") - 1
    assert len(expected) == 111
    np.testing.assert_allclose(found.means, expected, atol=1e-12)
    np.testing.assert_allclose(found.held_out, [0.5, -0.001])
    at = int(np.abs(expected).argmax())
    assert found.largest_mean == pytest.approx(expected[at])
    assert found.largest_mean_steps == (at + 1, at + 50)
    assert found.largest_held_out == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("losses", "held_out", "kept"),
    [
        ([1.0] * 100 + [1.0049] * 50, 0.9951, True),
        ([1.0] * 100 + [1.0051] * 50, 1.0, False),  # only the last fifty steps
        ([1.0] * 40 + [0.9949] * 50 + [1.0] * 60, 1.0, False),  # better is different, too
        ([1.0] * 150, 1.0051, False),
    ],
)
def test_one_mean_or_one_held_out_loss_beyond_half_a_per_cent_misses_the_goal(states, losses, held_out, kept):
    reference = record("fp32", [1.0] * 150, [(75, 1.0), (150, 1.0)])
    assert states.difference(record("8bit", losses, [(75, 1.0), (150, held_out)]), reference).kept is kept


def test_the_mean_of_both_pairs_is_held_against_the_goal(states):
    wanted = [states.Settings(model="gpt", dtype="bf16", betas=(0.9, 0.95), steps=3)]
    runs = {"fp32": 1.0, "8bit": 1.008, "control": 2.0, "8bit-control": 1.996}
    records = [record(variant, [loss] * 3, [(3, loss)]) for variant, loss in runs.items()]
    (single,) = states.compare(records[:3], wanted)
    assert single.mean == single.differences["8bit"]
    assert not single.mean.kept
    (both,) = states.compare(records, wanted)
    assert both.differences["control"].held_out == [1.0]
    assert both.mean.means == pytest.approx([(0.008 - 0.002) / 2] * 3)
    assert both.mean.held_out == pytest.approx([0.003])
    assert both.mean.kept


def test_the_last_run_counts_and_a_case_without_all_its_runs_is_left_out(states):
    def runs(loss, **case):
        return [record(variant, [loss] * 3, [(3, loss)], **case) for variant in ("fp32", "8bit", "control")]

    unfinished = runs(3.0, beta2=0.999)[1:]  # without the run that the others are compared with
    wanted = [states.Settings(model="gpt", dtype="bf16", betas=(0.9, beta2), steps=3) for beta2 in (0.999, 0.95)]
    (comparison,) = states.compare([*runs(1.0), *unfinished, *runs(2.0), *runs(3.0, beta2=0.5)], wanted)
    assert comparison.settings.betas == (0.9, 0.95)
    assert [found["losses"][0] for found in comparison.runs.values()] == [2.0] * 3
    with pytest.raises(ValueError, match=r"one of the cases with runs of fp32 and of 8-bit states .*got 2 records"):
        states.compare(unfinished, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_with_8bit_states_goes_on_bit_for_bit_from_a_state_dictionary(dtype):
    """In bf16 under the same model, for a model's own state_dict() holds bf16 weights and not their fp32 masters."""

    def prepare():
        torch.manual_seed(0)
        model = GPT(GPTConfig(layers=3, hidden=48, heads=2, sequence=24, vocabulary=70))
        return stronghold.offload(model, device="cpu", window=2, dtype=dtype)

    def optimizer_of(model, *, lr=3e-3):
        return stronghold.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.999), states="8bit")

    def train(model, optimizer, steps):
        losses = []
        for step in steps:
            tokens = torch.randint(0, 70, (2, 24), generator=torch.Generator().manual_seed(step))
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    whole = prepare()
    expected = train(whole, optimizer_of(whole), range(16))
    model = prepare()
    optimizer = optimizer_of(model)
    assert train(model, optimizer, range(8)) == expected[:8]
    saved = copy.deepcopy(optimizer.state_dict())
    if dtype is torch.float32:
        weights = copy.deepcopy(model.state_dict())
        model = prepare()
        model.load_state_dict(weights)
    fresh = optimizer_of(model, lr=0.7)
    fresh.load_state_dict(saved)
    assert train(model, fresh, range(8, 16)) == expected[8:]
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name
