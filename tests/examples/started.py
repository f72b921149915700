"""Starts an example's programs as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def start(program: str, *arguments: object, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """Runs ``program`` of examples/ to its end, by torchrun where there is to be more than one process."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(torchrun if processes > 1 else []), str(EXAMPLES / program), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)


def printed(program: str, *arguments: object, processes: int = 1) -> str:
    """Returns what it printed; what it complained of is the error where it failed."""
    done = start(program, *arguments, processes=processes)
    assert done.returncode == 0, done.stderr
    return done.stdout


def lines_of_tables(text: str) -> list[list[str]]:
    """Returns the cells of each line of a table in ``text``, without its head."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
