"""What processes of this machine send to one another, by torch.distributed as stages do: two children measure it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

from stronghold.probing.rounds import Key, Measure

BYTES = 16 * 2**20
"""What a large message has; a small one has eight bytes."""
LARGE, SMALL = 8, 64
"""So many of each in a sample."""
TIMEOUT_S = 60
"""So long either waits for the other within a sample."""


@contextmanager
def process_link(device: torch.device) -> Iterator[list[Measure]]:
    """What is to be measured between two processes: of the CPU, or of two GPUs where there are as many.

    Else, and where torch.distributed cannot connect two processes, that is nothing, the latter with a RuntimeWarning.
    The processes end with the block.
    """
    if not dist.is_available() or (device.type != "cpu" and not _several(device)):
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="stronghold-probe-") as folder:
        children = [_child(folder, rank, device.type) for rank in range(2)]
        try:
            yield [Measure("messages between processes", _Sample(children, Path(folder)).take)]
        finally:
            for child in children:
                assert child.stdin is not None
                with suppress(OSError):
                    child.stdin.close()  # which each takes for the end
            for child in children:
                try:
                    child.wait(timeout=5)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
                assert child.stdout is not None
                child.stdout.close()


class _Sample:
    """Asks both processes for a sample, of which the first answers, until one of them has failed.

    Between samples neither waits for the other: what else is probed meanwhile may take longer than ``TIMEOUT_S``.
    """

    def __init__(self, children: list[subprocess.Popen[str]], folder: Path) -> None:
        self._children, self._folder, self._failed = children, folder, False

    def take(self) -> Mapping[Key, float]:
        if self._failed:
            return {}
        answers = self._children[0].stdout
        assert answers is not None
        try:
            for child in self._children:
                assert child.stdin is not None
                child.stdin.write("\n")
                child.stdin.flush()
            message_s, bytes_per_s = map(float, answers.readline().split())
        except (OSError, ValueError):
            self._failed = True
            warnings.warn(
                f"messages between processes are not measured, and count as taking no time (got {self._told()!r} from "
                "torch.distributed); see to its network interface, as by GLOO_SOCKET_IFNAME, and probe again",
                RuntimeWarning,
                stacklevel=2,
            )
            return {}
        return {("processes", "message_s"): message_s, ("processes", "bytes_per_s"): bytes_per_s}

    def _told(self) -> str:
        """The last line of each error, once each. Errors are whole: who fails may still be writing one."""
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=5)
        errors = [path.read_text().split("\n") for path in sorted(self._folder.glob("*.err"))]
        lines = [[line for line in error if line.strip()] for error in errors]
        return "; ".join(dict.fromkeys(line[-1] for line in lines if line)) or "no answer"


def serve(folder: str, rank: int, device_type: str, timeout_s: float, asked: IO[str], answers: IO[str]) -> None:
    """Is one of the two processes: for each line of ``asked`` they measure, and the first writes what it found."""
    device = torch.device(device_type, rank) if device_type != "cpu" else torch.device("cpu")
    if device_type != "cpu":
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(
        "gloo" if device_type == "cpu" else None,
        store=dist.FileStore(f"{folder}/store", 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=timeout_s),
    )
    small, large = (torch.zeros(count, dtype=torch.uint8, device=device) for count in (8, BYTES))
    for _ in asked:
        if rank:
            for _ in range(1 + SMALL):
                dist.recv(small, 0)
                dist.send(small, 0)
            for _ in range(LARGE):
                dist.recv(large, 0)
            dist.send(small, 0)
        else:
            dist.send(small, 1)
            dist.recv(small, 1)  # the other one has been asked as well
            begin_s = time.perf_counter()
            for _ in range(SMALL):
                dist.send(small, 1)
                dist.recv(small, 1)
            small.sum().item()  # a GPU receives behind the host
            between_s = time.perf_counter()
            message_s = (between_s - begin_s) / (2 * SMALL)
            for _ in range(LARGE):
                dist.send(large, 1)
            dist.recv(small, 1)
            small.sum().item()  # likewise
            large_s = time.perf_counter() - between_s - (LARGE + 1) * message_s
            answers.write(f"{message_s} {LARGE * BYTES / max(large_s, 1e-9)}\n")
            answers.flush()
    dist.destroy_process_group()


def _several(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.device_count() > 1


def _child(folder: str, rank: int, device_type: str) -> subprocess.Popen[str]:
    # What answers has a descriptor of its own: gloo writes to standard output, under PyTorch 2.9 that it is connected.
    code = (
        f"import os, sys; answers = os.fdopen(os.dup(1), 'w'); os.dup2(2, 1); sys.path[:] = {sys.path!r}; "
        "from stronghold.probing.process_link import serve; "
        f"serve({folder!r}, {rank}, {device_type!r}, {TIMEOUT_S}, sys.stdin, answers)"
    )
    with Path(folder, f"{rank}.err").open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
