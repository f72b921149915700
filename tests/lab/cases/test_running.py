"""Runs of a case: the command that each is, which are made, and what happens to one that fails."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from stronghold.lab.cases import largest, running
from stronghold.lab.cases.case import CASES, Wanted
from stronghold.lab.cases.largest import attempt, find_largest, verdict
from stronghold.lab.cases.machines import TINY, V100
from stronghold.lab.cases.measurement import from_record
from stronghold.lab.cases.running import Place, run_case, training
from stronghold.lab.records.json_lines import append_record, read_records
from tests.lab.cases.conftest import MACHINE, make_record, make_trial


@pytest.fixture
def machine(monkeypatch):
    """Makes this machine the one of the records."""
    monkeypatch.setattr(running, "describe_machine", lambda: MACHINE | {"commit": "a" * 40})


@pytest.fixture
def said():
    return []


def fake(monkeypatch, module, program):
    """Has a small program run in the place of ``python -m stronghold train``, with the same arguments."""
    start = "import json, sys\noptions = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
    made = training

    def command(*arguments):
        return [sys.executable, "-c", start + program, *made(*arguments)[4:]]

    monkeypatch.setattr(module, "training", command)


def test_a_run_is_the_command_of_its_settings():
    command = training(V100, Wanted("stronghold", 32, 15), "cuda", 50)
    assert command[1:4] == ["-m", "stronghold", "train"]
    assert " ".join(command[4:]) == (
        "--method stronghold --layers 32 --hidden 2048 --heads 16 --vocabulary 51200 --batch 4 --seq 1024 --dtype fp32 "
        "--steps 50 --lr 0.00015 --device cuda --device-limit 34359738368 --window 15"
    )
    assert "--device-limit" not in training(V100, Wanted("stronghold", 32, 15), "cpu", 50)
    assert "--window" not in training(V100, Wanted("l2l", 78), "cuda", 50)
    on_disk = training(V100, Wanted("zero-infinity-nvme", 78), "cuda", 50)
    assert on_disk[-4:] == ["--store", "disk", "--update", "deferred"]


WRITES = """
record = json.loads(RECORD)
record["settings"].update(method=options["--method"], layers=int(options["--layers"]), window=int(options["--window"]))
open(options["--record"], "a").write(json.dumps(record) + "\\n")
"""


def test_only_what_is_missing_is_run(machine, monkeypatch, tmp_path, said):
    fake(monkeypatch, running, f"RECORD = {json.dumps(make_record())!r}\n" + WRITES)
    place = Place(results=tmp_path, device="cpu")
    append_record(tmp_path / "runs.jsonl", make_record(layers=2))
    assert run_case(CASES[4], TINY, place, said.append) == 0
    assert said == [
        "case 4, time per iteration as layers grow, --machine tiny: 1 of 2 runs to make",
        "run 1 of 1: stronghold, 3 layers, window 1",
    ]
    layers = [record["settings"]["layers"] for record in read_records(tmp_path / "runs.jsonl").records]
    assert layers == [2, 3]
    assert run_case(CASES[4], TINY, place, said.append) == 0
    assert said[2:] == ["case 4, time per iteration as layers grow, --machine tiny: 0 of 2 runs to make"]
    run_case(CASES[4], TINY, Place(results=tmp_path, device="cpu", again=True), said.append)
    assert len(read_records(tmp_path / "runs.jsonl").records) == 4


@pytest.mark.parametrize("other", [{"commit": "b" * 40}, {"host": {"processor": "Other", "cores": 1}}])
def test_results_of_another_machine_or_commit_are_not_taken_for_this_one(other, machine, monkeypatch, tmp_path, said):
    fake(monkeypatch, running, "sys.exit('no such thing')")
    append_record(tmp_path / "runs.jsonl", make_record(machine=other))
    assert run_case(CASES[4], TINY, Place(results=tmp_path, device="cpu"), said.append) == 2
    assert said[2] == "  stronghold, 2 layers, window 1 is left out: ended with 1: no such thing"


def test_case_2_says_which_method_case_1_must_find_first(machine, monkeypatch, tmp_path, said):
    fake(monkeypatch, running, "sys.exit(1)")
    preset = replace(TINY, methods=(*TINY.methods, "l2l"))
    run_case(CASES[2], preset, Place(results=tmp_path, device="cpu"), said.append)
    assert said[0] == "l2l is left out: its largest model is not known before case 1 has found it"


UP_TO_5 = """
if int(options["--layers"]) > 5:
    sys.exit("stronghold: error: out of memory")
"""


def test_the_search_finds_each_methods_largest_and_keeps_every_trial(machine, monkeypatch, tmp_path, said):
    preset = replace(TINY, first=2, most=40, methods=("stronghold",))
    fake(monkeypatch, largest, f"RECORD = {json.dumps(make_record())!r}\n" + UP_TO_5 + WRITES)
    monkeypatch.setattr(largest, "describe_machine", lambda: MACHINE)
    place = Place(results=tmp_path, device="cpu")
    assert find_largest(CASES[1], preset, place, said.append) == 0
    trials = [from_record(record, "x") for record in read_records(tmp_path / "trials.jsonl").records]
    assert [trial.layers for trial in trials] == [2, 4, 8, 6, 5]
    assert [trial.reason for trial in trials] == ["", "", *["ended with 1: out of memory"] * 2, ""]
    assert all(trial.has(TINY.shape) and trial.limits.host_bytes == TINY.host_limit for trial in trials)
    assert all(not name.name.startswith("trial-") for name in tmp_path.iterdir())
    find_largest(CASES[1], preset, place, said.append)  # all known
    assert len(read_records(tmp_path / "trials.jsonl").records) == 5


def test_a_search_that_is_stopped_goes_on_where_it_was(machine, monkeypatch, tmp_path, said):
    class Stopped(Exception):
        pass

    def stop_after_two():
        begun.append(None)
        if len(begun) > 2:
            raise Stopped

    begun = []
    preset = replace(TINY, first=2, most=40, grain=2, methods=("stronghold",))
    fake(monkeypatch, largest, f"RECORD = {json.dumps(make_record())!r}\n" + UP_TO_5 + WRITES)
    monkeypatch.setattr(largest, "describe_machine", lambda: MACHINE)
    place = Place(results=tmp_path, device="cpu")
    with pytest.raises(Stopped):
        find_largest(CASES[1], preset, place, said.append, before_trial=stop_after_two)
    assert find_largest(CASES[1], preset, place, said.append) == 0
    trials = [from_record(record, "x") for record in read_records(tmp_path / "trials.jsonl").records]
    assert [trial.layers for trial in trials] == [2, 4, 8, 6]  # exact to two layers


def test_a_trial_that_hangs_ends_after_its_time(monkeypatch, tmp_path):
    fake(monkeypatch, largest, "import time; time.sleep(60)")
    record = attempt(TINY, Wanted("stronghold", 2, 1), Place(results=tmp_path, device="cpu", timeout_s=0.3))
    assert record["reason"] == "not done after 300 ms"


def test_a_method_that_trains_nothing_is_left_out_with_the_reason(machine, monkeypatch, tmp_path, said):
    fake(monkeypatch, largest, "sys.exit('no such method')")
    assert find_largest(CASES[1], TINY, Place(results=tmp_path, device="cpu"), said.append) == 2
    assert "megatron-lm, 1 layers: ended with 1: no such method" in said
    assert said[-1] == "stronghold is left out: no trial of it passed"


@pytest.mark.parametrize(
    ("changed", "together", "expected"),
    [
        ({}, 4000, ""),
        ({"summary": {"steps": 2}}, 4000, "took 2 steps of 3"),
        ({"summary": {"last_loss": "nan"}}, 4000, "its loss is nan"),
        ({"summary": {"peak_device_bytes": TINY.device_limit + 1}}, 4000, "64.0 MiB on the device, over its limit"),
        ({}, 2999, "over the limit of memory"),
    ],
)
def test_the_verdict(changed, together, expected):
    assert verdict(from_record(make_trial(**changed), "x"), TINY, together) == expected


def test_ended_by_sigterm_it_ends_the_process_that_trains(tmp_path):
    program = f"""
import sys
from stronghold.lab.cases import __main__, running
sleeps = "import os, time; open({str(tmp_path / "pid")!r}, 'w').write(str(os.getpid())); time.sleep(100)"
running.training = lambda *_: [sys.executable, "-c", sleeps]
sys.exit(__main__.main(["run", "4", "--machine", "tiny", "--results", {str(tmp_path / "results")!r}]))
"""
    process = subprocess.Popen([sys.executable, "-c", program])
    until_s = time.monotonic() + 100
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < until_s:
        time.sleep(0.1)
    trains = psutil.Process(int((tmp_path / "pid").read_text()))
    process.terminate()
    assert process.wait(60) == 143
    assert not trains.is_running()


def test_a_real_trial_of_stronghold_passes_and_tells_what_it_took(tmp_path):
    record = attempt(TINY, Wanted("stronghold", 2, 1), Place(results=tmp_path, device="cpu"))
    found = from_record(record, "x")
    assert (found.reason, found.layers, found.window, found.steps) == ("", 2, 1, 3)
    assert found.has(TINY.shape)
    assert 100 * 2**20 < found.host_bytes < 2 * 2**30
    assert 100_000 < found.parameters < 200_000
    assert list(Path(tmp_path).iterdir()) == []
