"""Files that are written as a whole: on a full disk what was there is there still, and what was not is not."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from stronghold.formats.whole_file import write_whole
from tests.short_files import short_files


def test_what_is_written_is_there_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    for content in ("é\n", b"\xff\n", ""):
        write_whole(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("before", [None, "what was there"])
def test_a_full_disk_leaves_what_was_there_and_is_named(tmp_path, before):
    path = tmp_path / "file"
    if before is not None:
        path.write_text(before)
    with short_files(0), pytest.raises(OSError) as caught:
        write_whole(path, "new")
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == ({} if before is None else {"file": before})


@pytest.mark.parametrize(
    ("path", "number"), [("/dev/full", errno.ENOSPC), ("/nowhere/file", errno.ENOENT), ("/proc", errno.EISDIR)]
)
def test_what_cannot_be_written_is_named(path, number):
    with pytest.raises(OSError) as caught:
        write_whole(path, "new")
    assert (caught.value.errno, caught.value.filename) == (number, path)


def test_a_link_and_permissions_stay(tmp_path):
    (tmp_path / "below").mkdir()
    file, link = tmp_path / "below" / "file", tmp_path / "link"
    file.touch()
    file.chmod(0o600)
    link.symlink_to("below/file")
    write_whole(link, "new")
    assert link.is_symlink() and file.read_text() == "new" and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(tmp_path / "below") == ["file"]


def test_a_pipe_is_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    found = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_whole(tmp_path / "pipe", "new")
    reader.join()
    assert found == ["new"] and (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("refusal", [errno.EACCES, errno.EBUSY])
def test_a_file_whose_place_no_other_takes_is_written_itself(tmp_path, monkeypatch, refusal):
    """As in a folder that is not ours, or where the file is mounted by itself."""
    path = tmp_path / "file"
    path.write_text("what was there, and longer")

    def refuse(*_):
        raise OSError(refusal, "no")

    monkeypatch.setattr(Path, "replace", refuse)
    write_whole(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["file"]
    with pytest.raises(OSError, match="no"):
        write_whole(tmp_path / "other", "new")
    assert os.listdir(tmp_path) == ["file"]
