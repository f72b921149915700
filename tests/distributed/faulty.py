"""`stronghold train` with something that befalls one process: faulty.py FAULT RANK WHERE ARGUMENTS.

FAULT befalls at a place of the program, or is the version that WHERE has.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from stronghold import AdamW
from stronghold.checkpoint import saving
from stronghold.distributed import processes, watch
from stronghold.lab.cli import main
from stronghold.lab.models.gpt import GPT, Block


def _raise_unpicklable() -> None:
    raise ValueError("who can send a lambda?", lambda: None)


FAULTS: dict[str, Callable[[], Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda: time.sleep(1000),
    "raise": lambda: 1 / 0,
    "poison": lambda: float("nan"),
    "unpicklable": _raise_unpicklable,
}
WHERE: dict[str, tuple[Any, str, int]] = {  # what is called, and after how many times
    "beginning": (GPT, "initialize_module", 3),
    "forward": (Block, "forward", 25),
    "update": (AdamW, "step", 2),
    "checkpoint": (saving, "_write", 1),
}


def befall(fault: str, where: str) -> None:
    """Lets ``fault`` happen at a place of the program, once."""
    owner, name, calls = WHERE[where]
    original, left = getattr(owner, name), [calls]

    def faulty(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        factor = FAULTS[fault]() if left[0] == -1 else None
        result = original(*arguments, **options)
        return result if factor is None else result * factor

    setattr(owner, name, faulty)


if __name__ == "__main__":
    fault, rank, where, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    watch.BEAT_S, watch.LOST_S, watch.STUCK_S = 0.5, 6.0, 4.0
    if os.environ["RANK"] == rank and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        if where in processes.VERSIONS:
            processes.VERSIONS[where] = fault
        else:
            befall(fault, where)
    sys.exit(main(arguments))
