"""Runs programs as ``python COMMAND`` does, in forks of a process that has imported what takes seconds, once.

That process has imported everything and computed nothing, so that each fork is as a new one: it has the environment,
the output and the end of a process of its own.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import psutil


def run(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    logs: Sequence[Path],
    *,
    left: Sequence[int] = (),
    launcher: bool = False,
    timeout_s: float = 240,
) -> list[int]:
    """Runs ``python COMMAND``, of a module (``-m``) or a file, once in each of ``environments``, at the same time.

    Each is added to this process's own. What process i prints goes to file i of ``logs``. Those that are ``left`` do
    not end by themselves, and are killed when the others have ended; as by a ``launcher`` all are as soon as one has
    failed. Returns the exit codes, negative ones of signals; raises TimeoutError where one of the others does not end,
    and leaves none running.
    """
    server = _server()
    request = {
        "command": list(command),
        "environments": [{**os.environ, **environment} for environment in environments],
        "logs": [str(log) for log in logs],
        "left": list(left),
        "launcher": launcher,
        "timeout_s": timeout_s,
    }
    assert server.stdin is not None and server.stdout is not None
    try:
        print(json.dumps(request), file=server.stdin, flush=True)
        codes = json.loads(server.stdout.readline())
    except BaseException:  # a test that took too long, among others: the next one has a server of its own
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        _server.cache_clear()
        raise
    if codes is None:
        raise TimeoutError(f"{' '.join(command)} did not end within {timeout_s} s")
    return codes


@functools.cache
def _server() -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # which is read at the import
    command = [sys.executable, "-m", __name__]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True, start_new_session=True)


def _serve() -> None:
    for line in sys.stdin:
        print(json.dumps(_answer(**json.loads(line))), flush=True)


def _answer(
    command: list[str],
    environments: list[dict[str, str]],
    logs: list[str],
    left: list[int],
    launcher: bool,
    timeout_s: float,
) -> list[int] | None:
    started = []
    for environment, log in zip(environments, logs, strict=True):
        if (child := os.fork()) == 0:
            _become(command, environment, log)
        started.append(psutil.Process(child))
    codes: dict[psutil.Process, int] = {}
    waited = [process for rank, process in enumerate(started) if rank not in left]
    failed, until = False, time.monotonic() + timeout_s
    while waited and not failed and time.monotonic() < until:
        gone, waited = psutil.wait_procs(waited, timeout=0.1)
        codes.update((process, process.returncode) for process in gone)
        failed = launcher and any(codes.values())
    late = bool(waited) and not failed
    for process in started:
        if process not in codes:
            process.kill()
            codes[process] = process.wait()
    return None if late else [codes[process] for process in started]


def _become(command: list[str], environment: dict[str, str], log: str) -> NoReturn:
    """Runs ``command`` in this process and ends it, as the interpreter does."""
    os.environ.clear()
    os.environ.update(environment)
    for path, mode, descriptor in ((os.devnull, os.O_RDONLY, 0), (log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 1)):
        opened = os.open(path, mode, 0o666)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.dup2(1, 2)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")
    sys.exit(0)


if __name__ == "__main__":
    import torch._dynamo  # optimizers and checkpointing import it when they are first used
    import torch.distributed.pipelining.schedules
    import torch.utils.tensorboard  # noqa: F401

    import stronghold  # noqa: F401

    _serve()
