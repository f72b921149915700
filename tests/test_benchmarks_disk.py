"""benchmarks/disk.py runs and records what it promises, and takes no wrong data for a transfer."""

import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from stronghold.native import Disk

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
REFERENCES = [pytest.param(True, marks=pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio")), False]


@pytest.fixture
def disk(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("disk")


def arguments(tmp_path, *more):
    folder = tmp_path / "folder"
    folder.mkdir(exist_ok=True)
    return ["--path", str(folder), "--out", str(tmp_path / "disk.jsonl"), "--quick", "--total", "1MiB", *more]


@pytest.mark.parametrize("fio", REFERENCES)
def test_it_prints_a_table_and_records_every_contender(disk, tmp_path, capsys, fio):
    more = [] if fio else ["--without-fio"]
    assert disk.main(arguments(tmp_path, "--size", "64KiB", "--size", "256KiB", "--piece", "16KiB", *more)) == 0
    printed = capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "disk.jsonl").read_text().splitlines()]
    keys = ["store", "store_sums", *(["fio", "fio_uring"] if fio else []), "loop"]
    found = [(record["layer_bytes"], record["mode"], record["contender"]) for record in records]
    expected = [(size, mode, key) for size in (65536, 262144) for mode in ("read", "write", "mixed") for key in keys]
    if fio and ("fio_uring" not in {record["contender"] for record in records}):  # denied in many a container
        expected = [row for row in expected if row[2] != "fio_uring"]
    assert found == expected
    for record in records:
        assert record["name"] in printed
        assert len(record["bytes_s"]) == record["rounds"] == 2 and min(record["bytes_s"]) > 0
        assert record["layer_bytes"] * record["layers"] == 1 << 20
        assert (record["piece_bytes"], record["disk_threads"], record["lookahead"]) == (16384, 4, 2)
        assert record["reference"] == keys[2]
        assert {"time", "host", "versions", "commit", "file_system", "direct", "cores"} <= record.keys()
        target = record["contender"].startswith("store")
        assert record["met"] in ((True, False) if target else (None,))
    # The ratio is paired: of the two calls of one round, not of medians.
    ours, reference = records[0], records[2]
    ratios = [a / b for a, b in zip(ours["bytes_s"], reference["bytes_s"], strict=True)]
    assert ours["rate_over"][keys[2]]["median"] == pytest.approx(sum(ratios) / 2)
    assert list((tmp_path / "folder").iterdir()) == []


class Altering(Disk):
    """Reads a bit of the last transfer otherwise, or writes it so."""

    def read(self, file, memory, **settings):
        transfer = super().read(file, memory, **settings)
        transfer.wait()
        memory[-1] ^= 1
        return transfer

    def write(self, file, memory, **settings):
        altered = memory.clone()
        altered[0] ^= 1
        return super().write(file, altered, **settings)


@pytest.mark.parametrize("mode", ["read", "write", "mixed"])
def test_wrong_data_end_the_run_and_record_nothing(disk, tmp_path, monkeypatch, capsys, mode):
    monkeypatch.setattr(disk, "Disk", Altering)
    assert disk.main(arguments(tmp_path, "--size", "64KiB", "--mode", mode, "--without-fio")) == 1
    assert "WRONG" in capsys.readouterr().out
    assert not (tmp_path / "disk.jsonl").exists()
    assert list((tmp_path / "folder").iterdir()) == []


def test_fio_moves_the_same_bytes(disk, tmp_path):
    pattern = disk.Pattern(
        mode="mixed", layer_bytes=1 << 20, count=8, piece_bytes=65536, threads=4, path=tmp_path / "file"
    )
    one = disk.Fio(pattern, uring=False).command
    for part in ("--bs=65536", "--numjobs=4", f"--io_size={2 << 20}", "--rw=rw:196608", "--offset_increment=65536"):
        assert part in one
    other = disk.Fio(pattern, uring=True).command
    for part in ("--bs=65536", "--numjobs=1", f"--io_size={8 << 20}", "--rw=rw", "--iodepth=16"):
        assert part in other


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--size", "1000"], "must be a multiple of 4096 bytes"),
        (["--size", "1PiB"], "--path must have"),
        (["--rounds", "1"], "--rounds must be 2 or more"),
        (["--path", "/absent"], "--path must name a folder"),
    ],
)
def test_what_cannot_be_measured_is_refused(disk, tmp_path, capsys, more, message):
    with pytest.raises(SystemExit):
        disk.main([*arguments(tmp_path), *more])
    assert message in capsys.readouterr().err


def test_quartiles(disk):
    assert disk.spread([4.0, 1.0, 3.0, 2.0, 5.0]) == {"low": 2.0, "median": 3.0, "high": 4.0}
    assert torch.equal(disk.as_tensor(b"\x01\xff"), torch.tensor([1, 255], dtype=torch.uint8))
