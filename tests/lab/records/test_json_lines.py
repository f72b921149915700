"""JSON lines: written whole, read with whatever a crash has left."""

import json
import math
import shutil
import subprocess

import pytest

from stronghold.lab.records import json_lines
from stronghold.lab.records.json_lines import append_record, check_records, describe_machine, read_records, to_line


def test_what_is_appended_is_read(tmp_path):
    path = tmp_path / "new" / "runs.jsonl"
    append_record(path, {"a": 1, "b": [1.5, None, True], "c": {"d": "é\n"}})
    append_record(path, {"a": 2})
    found = read_records(path)
    assert found.records == ({"a": 1, "b": [1.5, None, True], "c": {"d": "é\n"}}, {"a": 2})
    assert found.truncated == ""
    assert len(path.read_text().splitlines()) == 2


def test_numbers_that_json_lacks_are_names():
    line = to_line({"loss": math.nan, "high": math.inf, "low": -math.inf, "path": json_lines.Path("x")})
    assert json.loads(line) == {"loss": "nan", "high": "inf", "low": "-inf", "path": "x"}
    assert float(json.loads(line)["low"]) == -math.inf


@pytest.mark.parametrize("cut", ['{"a": 2, "b', "{", '{"a": 2, "b": "\udcc3'])
def test_a_line_cut_off_at_the_end_is_left_out_and_said(tmp_path, cut):
    path = tmp_path / "runs.jsonl"
    append_record(path, {"a": 1})
    with path.open("ab") as file:
        file.write(cut.encode("utf-8", "surrogateescape"))
    found = read_records(path)
    assert found.records == ({"a": 1},)
    assert found.truncated == f"{path}:2 was cut off and is left out"
    append_record(path, {"a": 3})
    assert read_records(path) == json_lines.Records(records=({"a": 1}, {"a": 3}))


@pytest.mark.parametrize("last", [b"mine: the last line", b"[1, 2", b'"a"}', b"\xff\xfe", b" x"])
@pytest.mark.parametrize("before", [b"", b'{"a": 1}\n', b"first\n"])
def test_a_last_line_that_no_record_begins_is_not_dropped(tmp_path, before, last):
    """Somebody's notes lost their last line, since their editor had written no newline behind it."""
    path = tmp_path / "notes.txt"
    path.write_bytes(before + last)
    for attempt in (lambda: check_records(path), lambda: append_record(path, {"a": 2})):
        with pytest.raises(ValueError, match=rf"one JSON object a line \(got '{path}', whose last line is none: "):
            attempt()
        assert path.read_bytes() == before + last


def test_files_that_records_can_follow_pass_the_check_unchanged(tmp_path):
    path = tmp_path / "runs.jsonl"
    check_records(None)
    check_records(path)
    check_records("/dev/null")
    for content in (b"", b"\n", b'{"a": 1}\n', b'{"a": 1}', b'{"a": 1}\n{"b', b'{"a": 1}\n  ', b"notes\n"):
        path.write_bytes(content)
        check_records(path)
        assert path.read_bytes() == content


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"a": 1}')
    append_record(path, {"a": 2})
    assert read_records(path).records == ({"a": 1}, {"a": 2})


@pytest.mark.parametrize("line", ["nonsense", "[1]", "3"])
def test_a_bad_line_elsewhere_is_an_error_with_its_place(tmp_path, line):
    path = tmp_path / "runs.jsonl"
    path.write_text(f'{{"a": 1}}\n\n{line}\n{{"a": 2}}\n')
    with pytest.raises(ValueError, match=f"{path}:3: "):
        read_records(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"No such file.*absent"):
        read_records(tmp_path / "absent")


def test_a_full_disk_is_named():
    with pytest.raises(OSError, match=r"cannot write the record.*/dev/full"):
        append_record("/dev/full", {"a": "x" * 100_000})


def test_the_machine_is_described_in_plain_values():
    machine = describe_machine()
    assert json.loads(to_line(machine)) == machine
    assert machine["host"]["cores"] >= 1
    assert machine["host"]["memory_bytes"] > 2**28
    assert machine["versions"]["torch"].startswith("2.")
    assert machine["versions"]["stronghold"]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_tree_and_marked_if_it_was_changed(tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    assert json_lines._commit(tmp_path) is None
    git("init")
    assert json_lines._commit(tmp_path) is None
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    clean = json_lines._commit(tmp_path)
    assert len(clean) == 40
    (tmp_path / "new").write_text("1")
    assert json_lines._commit(tmp_path) == clean  # what git does not know of
    (tmp_path / "file").write_text("2")
    assert json_lines._commit(tmp_path) == f"{clean}-dirty"


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_results_that_grow_leave_the_commit_as_it_is(tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    git("init")
    for folder in ("results", "package"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    clean = json_lines._commit(tmp_path / "package")
    (tmp_path / "results" / "file").write_text("2")
    assert json_lines._commit(tmp_path / "package") == clean
    (tmp_path / "package" / "file").write_text("2")
    assert json_lines._commit(tmp_path / "package") == f"{clean}-dirty"


def test_damaged_lines_are_left_out_and_said_where_that_is_wanted(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_bytes(b'{"a": 1}\nx\n[2]\n\xff\n{"b": 2}\n{"c"')
    found = read_records(path, skip_damaged=True)
    assert found.records == ({"a": 1}, {"b": 2})
    assert found.truncated == f"{path}:6 was cut off and is left out"
    assert [note.split(" is no JSON object")[0] for note in found.damaged] == [f"{path}:{n}" for n in (2, 3, 4)]
