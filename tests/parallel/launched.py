"""Runs functions in several processes at once, as torchrun starts them: once for each number of processes."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any


def launch(
    module: str, function: str, processes: int, folder: Path, *arguments: str, timeout_s: float = 240
) -> list[Any]:
    """Returns what ``function(*arguments)`` of ``module`` returns in each process, in the order of their ranks.

    An exception in one is raised here, with the others' output.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(processes):
        own = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": processes,
            "LOCAL_WORLD_SIZE": processes,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": "test",
            "OMP_NUM_THREADS": 1,
        }
        command = [sys.executable, "-m", __name__, module, function, str(folder / str(rank)), *arguments]
        environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
        with open(folder / f"{rank}.log", "w") as log:
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout_s) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    said = "\n".join((folder / f"{rank}.log").read_text() for rank in range(processes))
    assert codes == [0] * processes, said
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(processes)]


if __name__ == "__main__":
    name, function, target, *arguments = sys.argv[1:]
    try:
        module = __import__(name, fromlist=[function])
        result = getattr(module, function)(*arguments)
        Path(target).write_bytes(pickle.dumps(result))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the others of the group would be waited for
