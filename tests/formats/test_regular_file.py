"""Files that are opened to be read: no named pipe, device or folder of their name is waited for or taken."""

import os
from pathlib import Path

import pytest

from stronghold.formats.lock import locked_to_read
from stronghold.formats.regular_file import open_regular
from stronghold.lab.records.json_lines import read_records


def test_a_file_is_opened_as_it_is_and_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"all of it")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"all of it"


def test_what_is_no_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # without a writer: to open it would wait
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(OSError, match=f"not a regular file: '{tmp_path}/{name}'"):
            open_regular(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "absent")


def test_a_log_and_a_lock_that_are_named_pipes_are_not_waited_for(tmp_path: Path) -> None:
    for name in ("log.jsonl", "lock"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=r"a record file must be readable \(got not a regular file for"):
        read_records(tmp_path / "log.jsonl")
    with locked_to_read(tmp_path):
        pass
