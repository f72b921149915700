"""One rule for machines: what computed and its host; the page and the cases follow it alike."""

import pytest

from stronghold.lab.cases.measurement import from_record
from stronghold.lab.page.reading import read_page_results
from stronghold.lab.records.hardware import NOT_RECORDED, hardware_of, moves_of
from stronghold.lab.records.runs import read_run
from tests.lab.page.examples import ARM, EPYC, GIB, record, start, step, write_lines

A, B = {"name": "A", "memory_bytes": 16 * GIB}, {"name": "B", "memory_bytes": 32 * GIB}
ON_HOST = "EPYC, 2 cores, 24.0 GiB"


def run_on(device, *gpus, host=EPYC):
    """Returns the record of a run, whose settings lack the device if that is None."""
    made = record("a", host=host, gpus=gpus)
    made["settings"]["device"] = device
    if device is None:
        del made["settings"]["device"]
    return made


RULES = [
    (run_on("cpu"), ON_HOST),
    (run_on("cpu", A, B), ON_HOST),
    (run_on("cuda", A, B), f"A 16.0 GiB, {ON_HOST}"),
    (run_on("cuda:0", A, B), f"A 16.0 GiB, {ON_HOST}"),
    (run_on("cuda:1", A, B), f"B 32.0 GiB, {ON_HOST}"),
    (run_on("cuda:2", A, B), f"GPU not recorded, {ON_HOST}"),
    (run_on("cuda"), f"GPU not recorded, {ON_HOST}"),
    (run_on("xpu:0", A), f"xpu, {ON_HOST}"),
    (run_on(None, A, B), f"A 16.0 GiB, B 32.0 GiB, {ON_HOST}"),
    (run_on(None), ON_HOST),
    (run_on("cuda", A, host=None), "A 16.0 GiB, host not recorded"),
    (run_on("cuda", {"name": "A"}), f"A, {ON_HOST}"),
    (run_on("cpu", host={"cores": 8}), "processor not recorded, 8 cores"),
    (run_on("cpu", host={"processor": "Z"}), "Z, ? cores"),
    (run_on("cuda", host="text"), NOT_RECORDED),
]


@pytest.mark.parametrize(("line", "words"), RULES)
def test_a_machine_is_what_computed_and_its_host(line, words):
    assert hardware_of(line) == words


@pytest.mark.parametrize(("line", "words"), RULES)
def test_the_page_and_the_cases_name_it_alike(line, words, tmp_path):
    assert from_record(line, "here").machine == words
    write_lines(tmp_path / "runs.jsonl", [line])
    (run,) = read_page_results(tmp_path).runs
    assert run.hardware == words


@pytest.mark.parametrize("machine", [None, "text", [], {}, {"host": [], "gpus": {}}])
def test_what_holds_no_machine_is_not_recorded(machine):
    assert hardware_of({"settings": None, "machine": machine}) == NOT_RECORDED
    assert hardware_of({}) == NOT_RECORDED


def test_a_run_moves_each_time_that_it_goes_on_elsewhere(tmp_path):
    hosts = [EPYC, ARM, ARM, EPYC]
    resumes = [{"event": "resume", "step": at, **start("a", host=host)} for at, host in enumerate(hosts, start=1)]
    write_lines(tmp_path / "log.jsonl", [{"event": "start", **start("a")}, step(1), *resumes])
    assert list(moves_of(read_run(tmp_path))) == [
        "went on after step 2 on another machine: Arm, 8 cores, 16.0 GiB",
        f"went on after step 4 on another machine: {ON_HOST}",
    ]
