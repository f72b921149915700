"""The probe: every field is filled, plausible and kept; what cannot be probed is refused before measuring begins."""

import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import stronghold
from stronghold.errors import StoreError, StrongholdError
from stronghold.native import BufferedDiskWarning, Disk, Fault, disk_errors
from stronghold.planner.machine_file import BESIDE_COMPUTE, DISK, LINK, MachineFile, Spread
from stronghold.planner.machine_rates import machine_of, op_rates
from stronghold.probing import disk_speed, kept_machine, rounds
from stronghold.probing import probe as probing_probe
from stronghold.probing.kept_machines import directory_there, disk_of, keep_machine, path_of
from stronghold.probing.this_machine import facts_of
from tests.probing.small import make_short

FORMATS = {f"{dtype}+{states}" for dtype in ("float32", "bfloat16") for states in ("fp32", "8bit", "muon")}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        make_short(patch)
        yield patch


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def machine(home, directory):
    told, before = [], torch.get_rng_state()
    found = stronghold.probe("cpu", directories=[directory], seconds=1, progress=lambda *one: told.append(one))
    assert torch.equal(torch.get_rng_state(), before)  # else dropout behind a probe would be another than without
    shares = [share for _, share in told]
    assert shares[0] < 0.1
    assert all(0 <= share <= 1 for share in shares)
    assert "matrix products in bfloat16" in {what for what, _ in told}
    return found


def spreads_of(value):
    """Yields every measured number of a file."""
    if isinstance(value, Spread):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from spreads_of(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from spreads_of(one)


def test_every_field_is_filled_and_plausible(machine, directory):
    assert (machine.device, machine.is_host, machine.runs_behind) == ("cpu", True, False)
    assert machine.device_memory_bytes is None
    assert 2**28 < machine.host_memory_bytes < 2**50
    assert machine.cores >= 1
    assert machine.processor
    assert machine.processor == machine.device_name
    assert machine.versions["torch"] == torch.__version__
    assert set(machine.link) == set(LINK)
    assert {one.dtype for one in machine.matmul} == {"float32", "bfloat16"} == {one.dtype for one in machine.attention}
    of_weights = {(16, 32, 32), (16, 32, 64), (48, 32, 32), (48, 32, 64)}
    assert {one.sizes for one in machine.matmul} == of_weights | {(32, 32, 16), (32, 32, 48)}
    assert {one.sizes for one in machine.attention} == {(2, 2, 16, 16, 16)}
    for rates in (machine.elementwise, machine.elementwise_cached):
        assert set(rates) == {"float32", "bfloat16"}
    functions = [f"{name}{way}" for name in ("gelu", "silu", "norm", "softmax") for way in ("", " backward")]
    named = {f"{dtype} {function}" for dtype in ("float32", "bfloat16") for function in functions}
    assert set(machine.transcendental) == {"float32", "bfloat16"} | named
    assert set(machine.host_update_ns) == FORMATS
    assert machine.device_update_ns == {}
    assert set(machine.disks) == {os.path.realpath(directory)}
    assert all(set(measured) == {*DISK, *BESIDE_COMPUTE} for measured in machine.disks.values())
    found = list(spreads_of([value for value in vars(machine).values()]))
    assert len(found) == 66
    for spread in found:
        assert 0 < spread.low <= spread.likely <= spread.high < math.inf
    for measured in machine.host_update_ns.values():
        assert measured["beside_compute"].likely >= measured["alone"].likely
        assert 0.01 < measured["alone"].likely < 1e4
    assert machine.compute_beside_update.low >= 1


def test_the_planner_takes_what_was_measured(machine, directory):
    rates = op_rates(machine)
    assert {kind for kind, _ in rates.flop_per_s} == {"matmul", "attention", "attention backward"}
    for name in FORMATS:
        dtype, states = name.split("+")
        found = machine_of(machine, dtype=dtype, states=states, directories=[os.path.realpath(directory)])
        of_adamw = f"{dtype}+fp32" if states == "muon" else name  # Muon leaves all but matrices to AdamW
        assert found.host_update_ns == machine.host_update_ns[of_adamw]["alone"].likely
        assert found.muon_host_ns == (machine.host_update_ns[name]["alone"].likely if states == "muon" else None)


def test_the_file_is_read_as_it_was_written(machine, tmp_path):
    machine.write(tmp_path / "machine.json")
    assert MachineFile.read(tmp_path / "machine.json") == machine


def test_what_was_measured_is_kept_for_this_machine_alone(machine):
    assert kept_machine("cpu") == machine == kept_machine(torch.device("cpu"))
    path, facts = path_of(facts_of(torch.device("cpu"))), facts_of(torch.device("cpu"))
    others = {
        "device": "cuda",
        "device_name": "another",
        "processor": "another",
        "cores": facts.cores + 1,
        "threads": None,  # of an older probe
        "host_memory_bytes": 2 * facts.host_memory_bytes,
        "versions": {**facts.versions, "torch": "1.0"},
    }
    for name, value in others.items():
        replace(machine, **{name: value}).write(path)
        assert kept_machine("cpu") is None, name
    path.write_text("{")
    assert kept_machine("cpu") is None
    machine.write(path)
    assert kept_machine("cpu") == machine


def test_a_machine_is_kept_for_each_precision_of_products(machine):
    torch.set_float32_matmul_precision("high")
    try:
        assert kept_machine("cpu") is None
        facts = facts_of(torch.device("cpu"))
        other = replace(machine, versions=facts.versions)
        path = keep_machine(other, facts)
        assert kept_machine("cpu") == other
    finally:
        torch.set_float32_matmul_precision("highest")
    assert kept_machine("cpu") == machine
    path.unlink()


@pytest.mark.parametrize(("kind", "device"), [("mkldnn", "cpu"), ("cuda", "cuda")])
def test_pytorchs_newer_setting_of_products_is_understood(kind, device):
    """TrainingArguments(tf32=True) has it, and the older one cannot be asked from then on."""
    program = f"""
import torch
from stronghold.probing import fp32_products
assert fp32_products(torch.device({device!r})) == "highest"
torch.backends.fp32_precision = "tf32"
torch.backends.{kind}.matmul.fp32_precision = "tf32"
print(fp32_products(torch.device({device!r})))
"""
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "high\n"
    )


def test_directories_that_were_probed_before_stay(machine, home, directory, tmp_path):
    assert kept_machine("cpu") == machine
    found = stronghold.probe("cpu", directories=tmp_path, seconds=1)
    assert set(found.disks) == {os.path.realpath(directory), os.path.realpath(tmp_path)}
    assert found.disks[os.path.realpath(directory)] == machine.disks[os.path.realpath(directory)]
    assert kept_machine("cpu") == found
    machine.write(path_of(facts_of(torch.device("cpu"))))


def test_no_scratch_file_stays(machine, directory):
    assert os.listdir(directory) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_no_scratch_file_stays_after_an_error_and_nothing_is_kept(home, directory, monkeypatch, tmp_path, error):
    monkeypatch.setenv("HOME", str(tmp_path))

    def fail(what, share):
        if what.startswith("the disk"):
            raise error

    with pytest.raises(error):
        stronghold.probe("cpu", directories=[directory], seconds=1, progress=fail)
    assert os.listdir(directory) == []
    assert kept_machine("cpu") is None


def test_a_file_that_a_full_disk_refuses_is_told_of_and_gone(home, directory, monkeypatch):
    def full(self, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_speed.DiskFile, "reserve", full)
    with pytest.raises(StoreError, match=r"must take a file of .* No space left .*free space there") as told:
        stronghold.probe("cpu", directories=[directory], seconds=1)
    assert str(directory) in str(told.value)
    assert os.listdir(directory) == []


def test_a_probe_without_keeping_keeps_nothing(home, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    found = stronghold.probe("cpu", seconds=1, keep=False)
    assert found.disks == {}
    assert os.listdir(tmp_path) == []


def test_a_machine_is_kept_in_the_home_at_hand(machine, home, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kept_machine("cpu") is None
    facts = facts_of(torch.device("cpu"))
    keep_machine(machine, facts)
    assert os.listdir(tmp_path / ".cache" / "stronghold" / "machines") == [path_of(facts).name]
    assert kept_machine("cpu") == machine


def test_what_cannot_be_kept_is_refused_before_it_is_measured(home, monkeypatch, tmp_path):
    (tmp_path / ".cache").write_text("a file")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StrongholdError, match=r"must be kept in .*have that directory take a file, or pass keep=False"):
        stronghold.probe("cpu", seconds=1, progress=lambda *_: pytest.fail("it was measured"))


def test_a_directory_that_cannot_be_probed_is_refused(home, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for path, reason in ((tmp_path / "missing", "does not exist"), (tmp_path / "file", "is a file")):
        with pytest.raises(StoreError, match=f"must be there .*{reason}.*; make it, or pass another"):
            stronghold.probe("cpu", directories=[path])
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(StoreError, match=r"this user may write .*grant the rights"):
        stronghold.probe("cpu", directories=[tmp_path])
    monkeypatch.undo()
    usage = disk_speed.shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(disk_speed.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StoreError, match=r"must have .* free \(got 1.00 MiB .*free space there"):
        stronghold.probe("cpu", directories=[tmp_path])


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, 1e9])
def test_seconds_are_checked(seconds):
    with pytest.raises(ValueError, match="seconds must be a number from 1"):
        stronghold.probe("cpu", seconds=seconds)


@pytest.mark.parametrize(("device", "rule"), [("cuda:77", "device"), ("nonsense", "must be a name that torch knows")])
def test_a_device_that_is_not_there_is_refused(device, rule):
    with pytest.raises(ValueError, match=rule):
        stronghold.probe(device, progress=lambda *_: pytest.fail("it was measured"))


def test_the_table_has_what_was_measured(machine, directory):
    text = str(machine)
    for part in (
        machine.processor,
        "GB/s",
        "GFLOP/s",
        "ns (",
        "float32, 8bit moments",
        "float32, Muon's momentum",
        f"disk {os.path.realpath(directory)}",
    ):
        assert part in text
    assert "<table" in machine._repr_html_()


def test_the_probe_of_the_library_is_that_of_its_room():
    assert stronghold.probe is probing_probe
    assert rounds.LEAST_ROUNDS >= 3


def test_a_directory_is_on_the_disk_of_the_one_above_it_that_is_there(machine, directory, tmp_path):
    there = str(directory)
    assert directory_there(directory / "run1" / "store") == there
    assert disk_of(machine, there) is disk_of(machine, str(directory / "run1" / "store")) is machine.disks[there]
    assert disk_of(machine, str(tmp_path)) is None
    elsewhere = replace(machine, disks={"/mnt/of/another/machine": machine.disks[there]})
    assert disk_of(elsewhere, "/mnt/of/another/machine") is machine.disks[there]
    assert disk_of(elsewhere, "/mnt/of/another/machine/run1") is None


def test_a_disk_without_direct_transfers_is_told_of(home, tmp_path, monkeypatch):
    """Else the store in the same process would not say it either, and memory would be taken for a disk."""
    monkeypatch.setattr(disk_errors, "_warned", set())
    monkeypatch.setattr(disk_speed, "Disk", lambda: Disk(faults=[Fault(kind="open", what="EINVAL")]))
    with pytest.warns(BufferedDiskWarning, match="refuses direct I/O"):
        stronghold.probe("cpu", directories=[tmp_path], seconds=1, keep=False)
