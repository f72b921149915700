"""What runs in each process of a test of what all run together. Holds no tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stronghold.distributed.processes import Processes
from stronghold.errors import ParallelError

PROCESSES = 3


def all_cases() -> dict[str, Any]:
    """Has processes fail at different places; returns what each case raised, and whether they go on together."""
    processes = Processes(torch.device("cpu"), wanted=1, replicas=PROCESSES)
    rank, found = processes.rank, dict[str, Any]()

    def failing(ranks: list[int], at: int, gathers: int) -> Callable[[], list[int]]:
        """Gathers so many times, and fails before one of them, or behind all, in processes of ``ranks``."""

        def action() -> list[int]:
            gathered = [0]
            for number in range(gathers + 1):
                if number == at and rank in ranks:
                    raise ValueError(f"process {rank} cannot")
                if number < gathers:
                    gathered = processes.all_gather_object(10 * number + rank)
            return gathered

        return action

    cases: dict[str, Callable[[], Any]] = {
        "none": failing([], 0, 2),
        "before what others gather": failing([1], 0, 2),
        "between two": failing([2], 1, 2),
        "behind all": failing([0], 2, 2),
        "two at once": failing([1, 2], 1, 2),
        "within another": lambda: processes.run_on_all(failing([1], 1, 2)),
        "where others run another": lambda: failing([1], 0, 1)() and processes.run_on_all(failing([], 0, 1)),
    }
    for name, action in cases.items():
        try:
            told = str(processes.run_on_all(action))
        except (ValueError, ParallelError) as error:
            told = f"{type(error).__name__}: {error}, {getattr(error, 'ours', True)}"
        found[name] = told, processes.all_gather_object((rank, name)) == [(n, name) for n in range(PROCESSES)]
    return found
