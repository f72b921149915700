"""A run's folder is written by one run at a time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stronghold.lab.run_folder import taken


@contextmanager
def in_another_process(folder: Path) -> Iterator[subprocess.Popen]:
    code = (
        "import sys; from stronghold.lab.run_folder import taken\n"
        "with taken(sys.argv[1]): print('taken', flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, folder], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout.readline() == "taken\n"
        yield process
        process.stdin.close()


def test_one_that_another_process_has_is_refused_until_that_ends(tmp_path):
    with in_another_process(tmp_path), pytest.raises(ValueError, match="one run at a time"), taken(tmp_path):
        pass
    with taken(tmp_path), taken(str(tmp_path)):  # as a run that is resumed does
        pass
    with in_another_process(tmp_path) as process:
        process.kill()
        process.wait()
        with taken(tmp_path):
            pass


def test_a_folder_that_is_not_there_is_nobody_s(tmp_path):
    with taken(tmp_path / "new"):
        assert not (tmp_path / "new").exists()
