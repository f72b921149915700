"""Messages between two processes: that they are measured, that nothing of it stays, and what a plan makes of them."""

import subprocess
import sys
import time

import psutil
import pytest
import torch

import stronghold
from stronghold.planner.machine_file import PROCESSES, MachineFile
from stronghold.planner.machine_rates import messages_s
from stronghold.probing import process_link as module
from stronghold.probing.process_link import _Sample, process_link
from tests.planner.machines import about, laptop
from tests.probing.small import make_short

CPU = torch.device("cpu")


def children():
    return psutil.Process().children()


def test_two_processes_are_measured_again_and_again_and_end_with_the_block():
    before = children()
    with process_link(CPU) as (measure,):
        found = [measure.sample() for _ in range(3)]
        assert len(children()) == len(before) + 2
    assert children() == before
    for one in found:
        assert set(one) == {("processes", name) for name in PROCESSES}
        assert 1e-7 < one["processes", "message_s"] < 1
        assert 1e6 < one["processes", "bytes_per_s"] < 1e12


def test_what_is_measured_in_between_may_take_longer_than_they_wait_for_one_another(monkeypatch):
    """As a slow disk may."""
    monkeypatch.setattr(module, "TIMEOUT_S", 10)
    with process_link(CPU) as (measure,):
        assert measure.sample()
        time.sleep(12)
        assert measure.sample()


def test_what_a_library_prints_is_no_answer(monkeypatch, tmp_path):
    """gloo tells that it is connected on standard output, under PyTorch 2.9."""
    (tmp_path / "sitecustomize.py").write_text(
        """
import os, sys, threading, time

def tell():  # as soon as torch.distributed is imported
    while "torch.distributed.distributed_c10d" not in sys.modules:
        time.sleep(0.001)
    for _ in range(3):
        os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks.\\n")

threading.Thread(target=tell, daemon=True).start()
"""
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with process_link(CPU) as (measure,):
        assert set(measure.sample()) == {("processes", name) for name in PROCESSES}


@pytest.mark.parametrize("error", [KeyboardInterrupt, pytest.param(RuntimeError, marks=pytest.mark.long)])
def test_the_processes_end_with_an_error_too(error):
    before = children()
    with pytest.raises(error), process_link(CPU):
        raise error
    assert children() == before


def test_where_they_cannot_be_connected_that_is_told_once_and_the_rest_is_measured(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/nowhere"])
    with process_link(CPU) as (measure,):
        with pytest.warns(RuntimeWarning, match=r"count as taking no time \(got .*No module named .*probe again"):
            assert measure.sample() == {}
        assert measure.sample() == {}


def test_what_the_processes_tell_is_read_when_they_have_told_all(tmp_path):
    slow = "import sys, time\nfor line in ('Traceback:', '  a place', 'ValueError: {0}'):"
    slow += "\n print(line, file=sys.stderr, flush=True); time.sleep({0})"
    children = []
    for rank in range(2):  # the first has ended while the second is still in the middle of it
        command = [sys.executable, "-c", slow.format(rank / 2)]
        with (tmp_path / f"{rank}.err").open("w") as error:
            pipe = subprocess.PIPE
            children.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=error, text=True))
    with pytest.warns(RuntimeWarning, match=r"\(got 'ValueError: 0.0; ValueError: 0.5' from"):
        assert _Sample(children, tmp_path).take() == {}
    for child in children:
        child.communicate()


def test_a_probe_has_them_and_its_file_keeps_them(monkeypatch, tmp_path):
    real = sys.modules["stronghold.probing.probe"].process_link
    make_short(monkeypatch)
    monkeypatch.setattr(sys.modules["stronghold.probing.probe"], "process_link", real)
    machine = stronghold.probe("cpu", seconds=1, keep=False)
    assert set(machine.processes) == set(PROCESSES)
    machine.write(tmp_path / "machine.json")
    assert MachineFile.read(tmp_path / "machine.json") == machine
    assert "between processes" in str(machine)


def test_a_message_takes_its_time_and_its_bytes():
    known = laptop(processes={"message_s": about(0.5), "bytes_per_s": about(100.0)})
    assert messages_s(known, [0, 200]) == [0.5, 2.5]
    assert messages_s(laptop(), [0, 200]) == messages_s(None, [0, 200]) == [0.0, 0.0]
