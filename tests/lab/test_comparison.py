"""Every method in turn: one that fails, refuses or is killed is a record, and the others run."""

import io
import os
import signal
import subprocess

import pytest
from rich.console import Console

from stronghold.lab import cli, comparison
from stronghold.lab.comparison import compare
from stronghold.lab.records.json_lines import read_records

TINY = ["train", "-l", "2", "--hidden", "32", "--heads", "2", "--vocabulary", "256", "--seq", "32", "--batch", "2"]


@pytest.fixture
def arguments(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    own = ["--data", str(text), "--steps", "3", "--device", "cpu", "--method", "all", "--out", str(tmp_path / "out")]
    return [*TINY, *own, "--record", str(tmp_path / "runs.jsonl"), "--log", str(tmp_path / "log.txt")]


def run(arguments):
    settings = cli._train_settings(cli._parser().parse_args(arguments))
    file = io.StringIO()
    records = compare(settings, arguments, console=Console(file=file, width=160))
    return {record["settings"]["method"]: record for record in records}, file.getvalue()


def only(monkeypatch, *methods):
    monkeypatch.setattr(comparison, "METHODS", dict.fromkeys(methods))


def test_each_has_a_record_and_a_line_and_what_fails_stops_nobody(arguments, monkeypatch, tmp_path):
    only(monkeypatch, "torchao-offload", "stronghold", "megatron-lm")
    records, shown = run([*arguments, "--store", "disk", "--states", "fp32"])
    assert records["torchao-offload"]["error"].startswith("refused: torchao-offload runs on CUDA alone")
    assert records["torchao-offload"]["losses"] == []
    assert records["torchao-offload"]["settings"]["layers"] == 2
    assert [len(records[name]["losses"]) for name in ("stronghold", "megatron-lm")] == [3, 3]
    # As stronghold trains on disk by itself, and clipped the same; the store is only for whom has one.
    assert [records[name]["settings"]["update"] for name in ("stronghold", "megatron-lm")] == [
        "in_backward",
        "deferred",
    ]
    assert [records[name]["settings"]["max_grad_norm"] for name in ("stronghold", "megatron-lm")] == [None, None]
    assert records["stronghold"]["settings"]["store"].endswith("stronghold/store")
    assert records["megatron-lm"]["settings"]["store"] == "ram"
    assert records["stronghold"]["summary"]["disk_bytes"] > 0
    assert not (tmp_path / "out" / "stronghold" / "store").exists()
    written = read_records(tmp_path / "runs.jsonl").records
    assert [one["settings"]["method"] for one in written] == ["torchao-offload", "stronghold", "megatron-lm"]
    assert "error" in written[0]
    assert "agrees" in shown and "the reference" in shown and "step     3/3" in shown
    assert "agrees" in (tmp_path / "log.txt").read_text()
    for name in ("stronghold", "megatron-lm"):
        assert (tmp_path / f"log_{name}.txt").read_text().count("\nstep ") == 3


def test_a_method_s_log_is_called_like_that_of_all(arguments, monkeypatch, tmp_path):
    only(monkeypatch, "l2l")
    run([*arguments, "--log", str(tmp_path / "log_all_l-2_h-32_bs-2_ws-1_now.txt")])
    assert "l2l" in (tmp_path / "log_l2l_l-2_h-32_bs-2_ws-1_now.txt").read_text()


@pytest.mark.parametrize(
    ("script", "error", "losses"),
    [
        ("kill -9 $$", "failed: ended by SIGKILL, out of memory?", []),
        ("echo 'stronghold: error: step 2 failed: x'; exit 1", "failed: step 2 failed: x", []),
        ("echo 'stronghold: error: no'; exit 2", "refused: no", []),
        ("echo 'stronghold: error: no'; echo 'a library: leaked 4 types!'; exit 2", "refused: no", []),
        ("echo one; echo; exit 1", "failed: one", []),
    ],
)
def test_how_a_method_ended_is_its_error(arguments, monkeypatch, tmp_path, script, error, losses):
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    only(monkeypatch, "l2l")
    monkeypatch.setattr(comparison.sys, "executable", str(program))
    records, shown = run(arguments)
    assert records["l2l"]["error"] == error
    assert records["l2l"]["losses"] == losses
    assert error in shown


@pytest.mark.parametrize("change", [["--save", "model"], ["--checkpoint-every", "2"], ["--resume"]])
def test_what_several_methods_cannot_share_is_refused(arguments, change, capsys):
    assert cli.main([*arguments, *change]) == 2
    assert "method='all'" in capsys.readouterr().err
    assert not os.path.exists(arguments[arguments.index("--out") + 1])


def test_a_signal_ends_the_method_under_way_with_the_comparison(arguments, monkeypatch, tmp_path):
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nkill -TERM $PPID\nexec sleep 100\n")
    program.chmod(0o755)
    only(monkeypatch, "l2l")
    monkeypatch.setattr(comparison.sys, "executable", str(program))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run(arguments)
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_signal_that_comes_while_a_method_is_being_started_ends_it_too(arguments, monkeypatch):
    started = []

    class Slow(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(["sleep", "100"], **kwargs)
            started.append(self)
            os.kill(os.getpid(), signal.SIGTERM)  # when nobody but this function knows of the process

    only(monkeypatch, "l2l")
    monkeypatch.setattr(comparison.subprocess, "Popen", Slow)
    with pytest.raises(KeyboardInterrupt):
        run(arguments)
    assert [process.returncode for process in started] == [-signal.SIGTERM]
