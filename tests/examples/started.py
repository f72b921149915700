"""Starts an example's programs as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import warm

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
    """Returns what it printed in ``processes`` that torchrun starts; what it complained of is the error if it fails."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *torchrun, str(EXAMPLES / program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env={**os.environ, **ENVIRONMENT})
    assert done.returncode == 0, done.stderr
    return done.stdout


def lines_of_tables(text: str) -> list[list[str]]:
    """Returns the cells of each line of a table in ``text``, without its head."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
