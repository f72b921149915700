"""Places to write to: what can be is taken without a trace, what cannot be is refused with its reason."""

import os

import pytest

from stronghold.lab.outputs import check_file, check_folder


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
