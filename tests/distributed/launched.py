"""Runs functions in several processes at once, as torchrun starts them: once for each number of processes."""

from __future__ import annotations

import os
import pickle
import random
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests import warm


def start(
    command: list[str],
    processes: int,
    folder: Path,
    *,
    left: Sequence[int] = (),
    launcher: bool = False,
    timeout_s: float = 240,
    port: int | None = None,
) -> tuple[list[int], list[str]]:
    """Runs ``python COMMAND`` in ``processes`` processes; returns their exit codes and what each printed, by rank.

    Those that are ``left`` do not end by themselves, and are killed when the others have ended; as by a ``launcher``
    all are as soon as one has failed. They meet at ``port``, by default a free one.
    """
    port = free_port() if port is None else port
    environments = [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "test",
            "OMP_NUM_THREADS": "1",
        }
        for rank in range(processes)
    ]
    logs = [folder / f"{rank}.log" for rank in range(processes)]
    codes = warm.run(command, environments, logs, left=left, launcher=launcher, timeout_s=timeout_s)
    return codes, [log.read_text() for log in logs]


def free_port() -> int:
    """Returns a port that nobody listens at, of those that the system gives nobody else in between.

    What it gives by itself (32768 and above, on Linux) may be another's connection before the processes meet there.
    """
    draw = random.SystemRandom()  # tests set the seeds of others, so that several would draw the same
    while True:
        port = draw.randrange(16384, 32768)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("localhost", port))
            return port


def launch(module: str, function: str, processes: int, folder: Path, *arguments: str) -> list[Any]:
    """Returns what ``function(*arguments)`` of ``module`` returns in each process, in the order of their ranks."""
    codes, said = start(["-m", __name__, module, function, str(folder), *arguments], processes, folder)
    assert codes == [0] * processes, "\n".join(said)
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(processes)]


if __name__ == "__main__":
    name, function, target, *arguments = sys.argv[1:]
    try:
        module = __import__(name, fromlist=[function])
        result = getattr(module, function)(*arguments)
        (Path(target) / os.environ["RANK"]).write_bytes(pickle.dumps(result))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the others of the group would be waited for
