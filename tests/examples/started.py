"""Starts an example's programs as a user would."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests import warm
from tests.distributed import launched

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def start(program: str, *arguments: object) -> tuple[int, str]:
    """Runs ``program`` of examples/ to its end; returns its exit code and what it printed and complained of."""
    command = [str(EXAMPLES / program), *map(str, arguments)]
    with tempfile.NamedTemporaryFile() as log:
        (code,) = warm.run(command, [ENVIRONMENT], [Path(log.name)])
        return code, Path(log.name).read_text()


def printed(program: str, *arguments: object) -> str:
    """Returns what it printed, which must not fail."""
    code, text = start(program, *arguments)
    assert code == 0, text
    return text


def printed_by(processes: int, program: str, *arguments: object) -> str:
    """Returns what it printed in ``processes`` that are started as by torchrun, but warm; it must not fail."""
    command = [str(EXAMPLES / program), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", ENVIRONMENT["COLUMNS"])
        codes, said = launched.start(command, processes, Path(folder), launcher=True)
    text = "".join(said)
    assert not any(codes), text
    return text


def lines_of_tables(text: str) -> list[list[str]]:
    """Returns the cells of each line of a table in ``text``, without its head."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
