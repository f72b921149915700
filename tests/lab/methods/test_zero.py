"""DeepSpeed's methods: the real package, in processes of its own (./test.sh --baselines)."""

import os
import subprocess
import sys

import pytest

from stronghold.lab.records.agreement import disagreements
from stronghold.lab.records.json_lines import read_records

METHODS = ("zero-offload", "zero-infinity", "zero-infinity-nvme")
# Wide enough for something to be swapped: DeepSpeed leaves parameters below a mebibyte in memory.
SHAPE = ["-l", "3", "--hidden", "64", "--heads", "2", "--vocabulary", "6000", "--seq", "32", "--batch", "2"]
MODULE = ("-m", "stronghold")

pytestmark = [pytest.mark.baselines, pytest.mark.timeout(1800)]  # the first one compiles


def train(method, folder, *arguments, start=MODULE):
    command = [sys.executable, *start, "train", "--method", method, *SHAPE, "--device", "cpu"]
    own = ["--steps", "12", "--lr", "3e-3", "--out", str(folder / method), "--record", str(folder / "runs.jsonl")]
    return subprocess.run([*command, *own, *arguments], capture_output=True, text=True, timeout=1500)


@pytest.mark.parametrize(("dtype", "clip"), [("fp32", "0.5"), ("fp32", "0"), ("bf16", "0.5")])
def test_it_learns_what_the_resident_model_learns(tmp_path, dtype, clip):
    for method in ("megatron-lm", *METHODS):
        done = train(method, tmp_path, "--dtype", dtype, "--clip", clip)
        assert done.returncode == 0, done.stdout + done.stderr
    records = read_records(tmp_path / "runs.jsonl").records
    assert len(records) == 4
    assert disagreements(records) == [None] * 4
    assert all(record["losses"][-1] < record["losses"][0] - 1 for record in records)
    assert len({record["losses"][0] for record in records}) == 1  # the same model, to the bit
    assert all(record["machine"]["versions"]["deepspeed"] for record in records[1:])
    if dtype == "fp32":
        expected = records[0]["losses"]
        assert all(record["losses"] == pytest.approx(expected, rel=1e-6) for record in records[1:])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_micro_batches_learn_what_the_batch_does(tmp_path, dtype):
    batch = ("--batch", "6", "--dtype", dtype, "--clip", "0.5")
    for method, own in (("megatron-lm", ()), *((method, ("--micro-batch", "2")) for method in METHODS)):
        done = train(method, tmp_path, *batch, *own, "--held-out", "5")
        assert done.returncode == 0, done.stdout + done.stderr
    records = read_records(tmp_path / "runs.jsonl").records
    assert disagreements(records) == [None] * 4
    expected = records[0]
    rel = 1e-6 if dtype == "fp32" else 1e-2
    for record in records[1:]:
        assert record["losses"] == pytest.approx(expected["losses"], rel=rel)
        assert record["summary"]["held_out_loss"] == pytest.approx(expected["summary"]["held_out_loss"], rel=rel)


def test_micro_batches_that_do_not_make_up_the_batch_are_refused(tmp_path):
    done = train("zero-offload", tmp_path, "--batch", "5", "--micro-batch", "2")
    assert done.returncode == 2
    assert "DeepSpeed's micro-batches must make up the batch (got batch=5 and micro_batch=2)" in done.stderr


def test_on_disk_its_bytes_are_counted_and_gone_afterwards(tmp_path):
    done = train("zero-infinity-nvme", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = read_records(tmp_path / "runs.jsonl").records
    assert record["summary"]["disk_bytes"] > 2 * 4 * 6000 * 64  # both moments of the embedding at least
    assert record["summary"]["disk_written_bytes"] > 2 * 4 * 6000 * 64
    assert list((tmp_path / "zero-infinity-nvme" / "store").iterdir()) == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_on_disk_it_learns_the_same_in_several_sub_groups(tmp_path, dtype):
    # Seven sub-groups of a mebibyte or more, the least that DeepSpeed swaps: the embedding, and three in each layer.
    program = (
        "import sys; from stronghold.lab import cli; from stronghold.lab.methods import zero_infinity_nvme; "
        "zero_infinity_nvme.SUB_GROUP = 262144; sys.exit(cli.main(sys.argv[1:]))"
    )
    # Without clipping: the gradients' norm is the groups', and would be rounded in another order.
    shape = ("-l", "2", "--hidden", "256", "--dtype", dtype, "--clip", "0")
    runs = {
        "ordinary": ("megatron-lm", MODULE),
        "one": ("zero-infinity-nvme", MODULE),
        "several": ("zero-infinity-nvme", ("-c", program)),
    }
    for name, (method, start) in runs.items():
        done = train(method, tmp_path / name, *shape, "--record", str(tmp_path / "runs.jsonl"), start=start)
        assert done.returncode == 0, done.stdout + done.stderr
    records = read_records(tmp_path / "runs.jsonl").records
    assert disagreements(records) == [None] * 3
    _, one, several = (record["losses"] for record in records)
    assert several == pytest.approx(one, rel=1e-6)
    assert several[-1] < several[0] - 1


@pytest.mark.parametrize("method", METHODS)
def test_what_it_cannot_keep_is_refused_in_one_line(tmp_path, method):
    done = train(method, tmp_path, "--resident", "1")
    assert done.returncode == 2
    assert f"{method} cannot keep resident" in done.stderr


def test_without_libaio_the_error_names_the_package(tmp_path):
    program = (
        "import sys; from deepspeed.ops.op_builder import AsyncIOBuilder; from stronghold.lab import cli; "
        "AsyncIOBuilder.is_compatible = lambda self, verbose=False: False; sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "train", "--method", "zero-infinity-nvme", *SHAPE, "--device", "cpu"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 2
    assert "needs libaio's headers; on Debian: apt-get install libaio-dev" in done.stderr
