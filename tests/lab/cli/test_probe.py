"""`stronghold probe`, and the machine that `stronghold plan` takes: a file, what was kept, or a probe made now."""

import json
import os

import pytest

from stronghold.lab import cli
from stronghold.lab.cli.probe import machine_of
from stronghold.planner.machine_file import MachineFile
from stronghold.probing import kept_machine
from tests.planner.machines import laptop
from tests.probing.small import make_short


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stronghold.lab.cli.probe.SECONDS", 1.0)
    make_short(monkeypatch)


def test_it_measures_prints_writes_and_keeps(tmp_path, capsys):
    (tmp_path / "disk").mkdir()
    assert cli.main(["probe", "--device", "cpu", "--disk", "disk", "--seconds", "1", "-o", "machine.json"]) == 0
    printed = capsys.readouterr().out
    assert "matrix products" in printed
    assert "machine.json: the machine" in printed
    found = MachineFile.read("machine.json")
    assert found == kept_machine("cpu")
    assert list(found.disks) == [os.path.realpath("disk")]
    assert os.listdir("disk") == []
    assert sorted(os.listdir()) == ["disk", "home", "machine.json"]


def test_it_keeps_nothing_where_it_is_not_to(capsys):
    assert cli.main(["probe", "--device", "cpu", "--no-keep", "--seconds", "1"]) == 0
    assert "GFLOP/s" in capsys.readouterr().out
    assert kept_machine("cpu") is None
    assert os.listdir() == []


def test_what_cannot_be_kept_is_one_line(tmp_path, capsys):
    (tmp_path / "home").write_text("a file")
    assert cli.main(["probe", "--device", "cpu", "--seconds", "1"]) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith("stronghold: error: what is measured must be kept in")
    assert "\n" not in told


def test_a_file_is_the_machine():
    laptop().write("machine.json")
    assert machine_of("machine.json", None, ()) == laptop()
    with pytest.raises(ValueError, match=r"--machine must be a file .*'nowhere'"):
        machine_of("nowhere", None, ())


def test_what_was_kept_is_the_machine_until_a_disk_is_missing(tmp_path, capsys):
    (tmp_path / "disk").mkdir()
    first = machine_of(None, "cpu", ())
    assert "this machine has not been measured yet" in " ".join(capsys.readouterr().err.split())
    assert kept_machine("cpu") == first
    assert machine_of(None, "cpu", ()) == first
    assert capsys.readouterr().err == ""
    second = machine_of(None, "cpu", ["disk"])
    assert f"{os.path.realpath('disk')} has not been measured yet" in " ".join(capsys.readouterr().err.split())
    assert list(second.disks) == [os.path.realpath("disk")]
    assert machine_of(None, "cpu", ["disk"]) == second


def test_a_machine_file_that_lacks_something_is_refused(capsys):
    laptop().write("machine.json")
    with open("machine.json") as file:
        content = json.load(file)
    del content["link"]["d2h"]
    with open("machine.json", "w") as file:
        json.dump(content, file)
    with pytest.raises(ValueError, match=r"link of the machine file machine.json .*d2h.*; measure the machine again"):
        machine_of("machine.json", None, ())
