"""Places to write to: what can be is taken without a trace, what cannot be is refused with its reason."""

import os

import pytest
from matplotlib.figure import Figure

from stronghold.lab.outputs import check_apart, check_file, check_folder, check_save, checkpoints_over, write_figure
from tests.short_files import short_files


def test_a_check_leaves_nothing_and_changes_nothing(tmp_path):
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe")  # which nobody reads: to open it would wait
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for name in ("file", "new", "new/below", "pipe"):
        check_file("out", tmp_path / name)
    for name in ("", "new", "new/below"):
        check_folder("out", tmp_path / name)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("check", "path", "reason"),
    [
        (check_file, "", "no file's name"),
        (check_file, "new/", "no file's name"),
        (check_file, "folder", "a directory"),
        (check_file, "file/below", "Not a directory"),
        (check_file, "loop", "Too many levels of symbolic links"),
        (check_file, "dangling", "Not a directory"),
        (check_file, "/proc/nowhere", "No such file or directory"),
        (check_folder, "", "no folder's name"),
        (check_folder, "file", "Not a directory"),
        (check_folder, "folder/../file/below", "Not a directory"),
        (check_folder, "/proc/nowhere", "No such file or directory"),
    ],
)
def test_what_cannot_be_written_is_refused_with_its_reason(tmp_path, monkeypatch, check, path, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("file/below")
    with pytest.raises(ValueError, match=f"^out must be a (file|folder) that can be written .got '{path}': {reason}"):
        check("out", path)


@pytest.mark.parametrize(
    ("save", "refused"),
    [
        ("run", "out='run', which is the same"),
        ("./run/../run/", "out='run', which is the same"),
        ("link", "out='run', which is the same"),
        (".", "out='run', which is in it"),
        ("logs", "log='logs/here/log.txt', which is in it"),
        ("logs/here/log.txt", "log='logs/here/log.txt', which is the same"),
        ("logs/here/log.txt/below", "log='logs/here/log.txt', which is a file above it"),
        ("disk", "store='disk/two', which is in it"),
        ("run/model", None),
        ("link/model", None),
        ("runs", None),
        ("disk/two/model", None),
        ("logs/here/model", None),
    ],
)
def test_a_model_is_saved_where_nothing_else_of_the_run_is(tmp_path, monkeypatch, save, refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("run")
    places = {
        "folders": [("out", "run"), ("store", "one"), ("store", "disk/two")],
        "files": [("log", "logs/here/log.txt"), ("record", None)],
    }
    if refused is None:
        check_save(save, **places)
    else:
        told = rf"^save must be .*\(got save='{save}' and {refused}\); pass another path for one"
        with pytest.raises(ValueError, match=told):
            check_save(save, **places)
    assert os.listdir(tmp_path) == ["link"]


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ("rows.txt", "data='rows.txt', which is read, and would be lost"),
        ("link.txt", "data='rows.txt', which is read, and would be lost"),
        ("run/log.jsonl", "the run's log='run/log.jsonl', which is of the run's own"),
        ("run", "the run's log='run/log.jsonl', which is of the run's own"),
        ("run/step-4/log.txt", "the run's checkpoint='run/step-4', which is of the run's own"),
        ("texts/a.txt", "data='texts/\\*.txt', which is read, and would be lost"),
        ("model/config.json", "model='model', which is read, and would be lost"),
        ("texts/b.txt", None),
        ("model/log.txt", None),
        ("/dev/null", None),
        ("disk", "store='disk/one', which is a folder of the run's"),
        ("record.jsonl", "record='record.jsonl', which is another output"),
        ("run/log.txt", None),
        ("disk/one/log.txt", None),
    ],
)
def test_a_log_is_where_nothing_else_is(tmp_path, monkeypatch, log, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.txt").write_text("what to learn")
    (tmp_path / "link.txt").symlink_to("rows.txt")
    for name in ("texts/a.txt", "model/config.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    outputs = [("record", "/dev/null" if log == "/dev/null" else "record.jsonl"), ("log", log)]
    places = {
        "kept": [("the run's log", "run/log.jsonl"), *checkpoints_over("run", r"step-\d+", outputs)],
        "folders": [("store", "disk/one")],
        "inputs": [("model", "model"), ("data", "texts/*.txt"), ("data", "rows.txt"), ("tokenizer", "not/there")],
    }
    if told is None:
        check_apart(outputs, **places)
    else:
        with pytest.raises(
            ValueError, match=rf"^log must have a place of its own \(got log='{log}' and {told}\); pass"
        ):
            check_apart(outputs, **places)


def test_a_picture_that_cannot_be_written_leaves_the_one_of_before(tmp_path):
    path = tmp_path / "x.png"
    path.write_bytes(b"before")
    with short_files(1024), pytest.raises(OSError, match=r"cannot write the figure.*x.png"):
        write_figure(Figure(), path, "png")
    assert path.read_bytes() == b"before"
    assert [*tmp_path.iterdir()] == [path]
    write_figure(Figure(), path, "png")
    assert path.read_bytes().startswith(b"\x89PNG")
