"""benchmarks/adamw.py runs and records what it promises, and takes no wrong result for AdamW's."""

import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stronghold import native

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SMALL = ("--parameters", "64Ki", "--rounds", "2", "--threads", "1")


@pytest.fixture
def adamw(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    threads, module = torch.get_num_threads(), importlib.import_module("adamw")
    monkeypatch.setattr(module, "deepspeed_contenders", lambda buffers: [])
    yield module
    torch.set_num_threads(threads)


def test_it_prints_a_table_and_records_every_contender(tmp_path):
    out = tmp_path / "adamw.jsonl"
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "adamw.py", *SMALL, "--without-deepspeed", "--parameters", "1Mi", "--out", out],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["contender"] for record in records] == ["bound", "fp32", "split", "8bit", "torch"]
    assert [record["moved_bytes"] for record in records] == [28, 28, 26, 14.0625, 28]
    for record in records:
        assert record["name"] in done.stdout
        assert (record["parameters"], record["rounds"], record["threads"]) == (2**20, 2, 1)
        assert len(record["times_s"]) == 2 and min(record["times_s"]) > 0
        for name in ("ns_per_parameter", "gb_s", "of_bound"):
            assert 0 < record[name]["low"] <= record[name]["median"] <= record[name]["high"]
        assert record["time_over"].keys() == {"bound", "fp32", "split", "8bit", "torch"}
        assert record["peak_bytes"] > 38 * 2**20
        assert {"time", "host", "gpus", "versions", "commit", "isa", "huge_pages", "huge_page_bytes"} <= record.keys()
        assert record["versions"]["deepspeed"] is None
    fp32, eight_bit = records[1], records[3]
    assert fp32["largest_error"].keys() == {"weight_ulp", "exp_avg_ulp", "exp_avg_sq_ulp"}
    assert eight_bit["largest_error"].keys() == {"weight_ulp", "exp_avg_codes", "exp_avg_sq_codes"}
    assert [(target["other"], target["limit"]) for target in fp32["targets"]] == [("bound", 0.97), ("torch", 1.0)]
    # The ratio is paired: of the two calls of one round, not of medians.
    bound = records[0]
    ratios = sorted(theirs / ours for theirs, ours in zip(bound["times_s"], fp32["times_s"], strict=True))
    assert fp32["of_bound"]["median"] == pytest.approx(sum(ratios) / 2)
    assert "not measured" in done.stdout  # what the targets say of DeepSpeed


def skip(segment):
    pass


def nudge_weight(segment):
    """Moves one weight by four ulp, one of the last block."""
    part = segment.weight if segment.remainder is None else segment.remainder
    part.view(torch.int32 if segment.remainder is None else torch.int16)[-3] += 4


def nudge_exp_avg_sq(segment):
    if not isinstance(segment.exp_avg_sq, native.Blocks):
        segment.exp_avg_sq[0] *= 1.00001


def nudge_code(segment):
    if isinstance(segment.exp_avg, native.Blocks):
        segment.exp_avg.codes[70] += 2


def double_exponent(segment):
    """Rewrites a block with twice the range: its codes stand for the same numbers, its exponent is not the least."""
    if isinstance(segment.exp_avg_sq, native.Blocks):
        blocks = segment.exp_avg_sq
        blocks.exponents[0] += 1
        blocks.codes[:64] -= 16


def round_high_down(segment):
    """Stores the same master with a bf16 half that is not the nearest."""
    if segment.remainder is not None:
        segment.weight.view(torch.int16)[5] += 1


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (nudge_weight, "weight of element 65533 is"),
        (nudge_exp_avg_sq, "exp_avg_sq of element 0 is"),
        (nudge_code, "exp_avg of element 70 is"),
        (double_exponent, "exp_avg_sq of block 0 has exponent"),
        (round_high_down, "weight of element 5 is"),
    ],
)
def test_a_wrong_result_is_found(adamw, monkeypatch, capsys, tmp_path, spoil, says):
    right = native.adamw

    def wrong(segments, **settings):
        right(segments, **settings)
        if segments[0].step == adamw.FIRST_STEP + 1:
            spoil(segments[0])

    monkeypatch.setattr(native, "adamw", wrong)
    assert adamw.main([*SMALL, "--out", str(tmp_path / "adamw.jsonl")]) == 1
    printed = capsys.readouterr().out
    assert "WRONG: stronghold" in printed and says in printed
    assert not (tmp_path / "adamw.jsonl").exists()


def test_a_step_not_taken_is_found(adamw, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(native, "adamw", lambda segments, **settings: None)
    assert adamw.main([*SMALL, "--out", str(tmp_path / "adamw.jsonl")]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_step_of_torch_not_taken_is_found(adamw, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)
    assert adamw.main([*SMALL, "--out", str(tmp_path / "adamw.jsonl")]) == 1
    assert "WRONG: torch fused" in capsys.readouterr().out


def test_it_runs_without_deepspeed(adamw, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(adamw.importlib.util, "find_spec", lambda name: None)
    assert adamw.main([*SMALL, "--out", str(tmp_path / "adamw.jsonl")]) == 0
    assert "DeepSpeed: not installed" in capsys.readouterr().out


def test_it_runs_with_a_deepspeed_that_cannot_be_built(adamw, monkeypatch, capsys, tmp_path):
    def fails(buffers):
        raise RuntimeError("requires the cpu_adam op") from ImportError("no compiler")

    monkeypatch.setattr(adamw.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(adamw, "deepspeed_contenders", fails)
    assert adamw.main([*SMALL, "--out", str(tmp_path / "adamw.jsonl")]) == 0
    assert "DeepSpeed: cannot be used (no compiler)" in capsys.readouterr().out


def test_huge_pages_that_are_refused_are_an_error(adamw, monkeypatch, capsys, tmp_path):
    def refuses(memory):
        raise OSError(22, "the kernel refuses huge pages; run without --huge-pages")

    monkeypatch.setattr("adamw_contenders.advise_huge_pages", refuses)
    assert adamw.main([*SMALL, "--huge-pages", "--out", str(tmp_path / "adamw.jsonl")]) == 2
    assert "run without --huge-pages" in capsys.readouterr().out


def test_an_interrupt_discards_what_was_measured(adamw, monkeypatch, capsys, tmp_path):
    right = native.adamw

    def interrupted(segments, **settings):
        if segments[0].step > adamw.FIRST_STEP + 1:
            raise KeyboardInterrupt
        right(segments, **settings)

    monkeypatch.setattr(native, "adamw", interrupted)
    assert adamw.main([*SMALL, "--out", str(tmp_path / "adamw.jsonl")]) == 130
    assert "Interrupted" in capsys.readouterr().out
    assert not (tmp_path / "adamw.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--parameters", "many"), "write 134217728 or 128Mi"),
        (("--rounds", "0"), "a count of 1 or more"),
        (("--threads", "100000"), "cores that can be used"),
        (("--parameters", "900000Gi"), "pass at most"),
        (("--out", "."), "must name a file"),
    ],
)
def test_arguments_that_cannot_be_are_refused(adamw, capsys, arguments, says):
    with pytest.raises(SystemExit) as exit:
        adamw.main(list(arguments))
    assert exit.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_the_sample_has_whole_blocks_the_first_and_the_last(adamw):
    for parameters in (1, 63, 64, 8191, 8193, 1_000_003):
        positions = adamw.Sample(parameters).positions
        assert positions[0] == 0 and positions[-1] == parameters - 1
        assert positions.unique().numel() == positions.numel()
        first_of_blocks = positions[positions % native.BLOCK == 0]
        assert first_of_blocks.numel() == -(-positions.numel() // native.BLOCK)


def test_targets_name_contenders_of_the_benchmark(adamw):
    targets = [dataclasses.asdict(target) for target in adamw.TARGETS]
    assert {target["contender"] for target in targets} == {"fp32", "split", "8bit"}
    assert {target["quantity"] for target in targets} == {"time", "bandwidth"}


def test_in_a_cache_every_instruction_set_and_format_is_recorded(adamw, capsys, tmp_path):
    out = tmp_path / "adamw.jsonl"
    assert importlib.import_module("adamw_in_cache").main(["--rounds", "2", "--out", str(out)]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    formats = [f"{isa} {kind}" for isa in native.available_isas() for kind in ("fp32", "split", "8bit")]
    assert [record["contender"] for record in records] == ["torch", *formats]
    assert all(record["benchmark"] == "adamw_in_cache" and record["rounds"] == 2 for record in records)
    assert records[0]["time_over_torch"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    printed = capsys.readouterr().out
    assert all(record["contender"] in printed for record in records)


def test_in_a_cache_a_step_not_taken_is_found(adamw, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(native, "adamw", lambda segments, **settings: None)
    out = tmp_path / "adamw.jsonl"
    assert importlib.import_module("adamw_in_cache").main(["--rounds", "1", "--out", str(out)]) == 1
    assert "WRONG: plain fp32" in capsys.readouterr().out
    assert not out.exists()
