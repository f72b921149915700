"""vPipe's file: its own are read, ours are read back, and what is no partition is refused by name."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stronghold.planner.partition import Partition, StagePlan
from stronghold.planner.partition_file import PartitionFile, read_partition, write_partition


def stage(layers, recomputed):
    return StagePlan(first=0, layers=layers, recomputed=recomputed, forward_s=0, backward_s=0, memory_bytes=0)


def file(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "partition", "ratios"),
    [
        # of github.com/hku-systems/vpipe: runtime/bert/vgpus=4/vpipe.json, with its line breaks, and gpipe.json
        (
            '{\n    "partition": [12, 13, 13, 11],\n    "recompute_ratio": [0.3, 0, 0, 0]\n}',
            (12, 13, 13, 11),
            (0.3, 0, 0, 0),
        ),
        ('{"partition": [13, 13, 13, 10], "recompute_ratio": [1, 1, 1, 1]}\n', (13, 13, 13, 10), (1, 1, 1, 1)),
    ],
)
def test_vpipes_own_files(tmp_path, text, partition, ratios):
    assert read_partition(file(tmp_path / "vpipe.json", text)) == PartitionFile(
        partition=partition, recompute_ratio=ratios
    )


def test_what_is_written_is_vpipes_form(tmp_path):
    path = tmp_path / "conf.json"
    write_partition(path, Partition(stages=(stage(26, 26), stage(23, 23)), ideal_s=1.0))
    assert path.read_text() == '{"partition": [26, 23], "recompute_ratio": [1, 1]}\n'
    write_partition(path, Partition(stages=(stage(4, 1), stage(3, 0)), ideal_s=1.0))
    assert path.read_text() == '{"partition": [4, 3], "recompute_ratio": [0.25, 0]}\n'


@given(st.lists(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1))
def test_what_is_written_means_as_many_layers_to_vpipe(tmp_path_factory, stages):
    path = tmp_path_factory.mktemp("partition") / "conf.json"
    write_partition(path, Partition(stages=tuple(stage(*x) for x in stages), ideal_s=1.0))
    found = read_partition(path)
    assert list(found.partition) == [layers for layers, _ in stages]
    taken = [int(r * n) for n, r in zip(found.partition, found.recompute_ratio, strict=True)]  # as vPipe's Stage does
    assert taken == list(found.recomputed) == [recomputed for _, recomputed in stages]


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ([26, 23], "an object of partition and recompute_ratio alone (got a list)"),
        ({"partition": [26, 23]}, "an object of partition and recompute_ratio alone (got keys ['partition'])"),
        (
            {"partition": [1], "recompute_ratio": [1], "chunks": 8},
            "alone (got keys ['chunks', 'partition', 'recompute_ratio'])",
        ),
        ({"partition": 26, "recompute_ratio": [1]}, "partition must be a list of numbers (got 26)"),
        ({"partition": [], "recompute_ratio": []}, "none below 1 (got [])"),
        ({"partition": [26, 0], "recompute_ratio": [1, 1]}, "none below 1 (got [26, 0])"),
        ({"partition": [26, True], "recompute_ratio": [1, 1]}, "none below 1 (got [26, True])"),
        ({"partition": [26, 2.5], "recompute_ratio": [1, 1]}, "none below 1 (got [26, 2.5])"),
        ({"partition": [26, 23], "recompute_ratio": [1, 1.1]}, "numbers from 0 to 1 (got [1, 1.1])"),
        ({"partition": [26, 23], "recompute_ratio": [1, "1"]}, "numbers from 0 to 1 (got [1, '1'])"),
        ({"partition": [26, 23], "recompute_ratio": [1, float("nan")]}, "numbers from 0 to 1 (got [1, nan])"),
        ({"partition": [26, 23], "recompute_ratio": [1]}, "a number for each stage (got 2 and 1)"),
    ],
)
def test_what_is_no_partition(tmp_path, found, reason):
    path = file(tmp_path / "conf.json", json.dumps(found))
    with pytest.raises(ValueError) as error:
        read_partition(path)
    assert str(error.value).startswith(f"'{path}' is no partition: ") and reason in str(error.value)


@pytest.mark.parametrize("text", ["", "{", '{"partition": [1,], "recompute_ratio": [1]}', "\x00"])
def test_what_is_no_json(tmp_path, text):
    path = file(tmp_path / "conf.json", text)
    with pytest.raises(ValueError, match=r"conf.json' is no partition: .*; write one such as"):
        read_partition(path)


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(ValueError, match=r"absent' is no partition: .*No such file"):
        read_partition(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match="binary' is no partition"):
        read_partition(tmp_path / "binary")
