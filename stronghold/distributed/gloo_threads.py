"""The end of a process whose threads of gloo may still hold what Python has let go of."""

from __future__ import annotations

import os
import time
from pathlib import Path

_NAME = "pt_gloo_runloop"
"""What PyTorch calls the threads that carry out gloo's collectives."""
_LOOKS = 3
_LONGEST_S = 5.0


def wait_for_gloo() -> None:
    """Waits until gloo's threads in this process have let go of the tensors of their last collectives.

    Called when the interpreter is about to end. A collective is over for its caller before the thread that carried it
    out lets go of its tensors, and the last reference to one takes Python's lock. Where the interpreter ends meanwhile,
    that ends the thread, and C++ then ends the process: "terminate called without an active exception". This can happen
    to every program that ends soon behind a collective, where its cores are busy.
    """
    deadline, quiet = time.monotonic() + _LONGEST_S, 0
    while quiet < _LOOKS and time.monotonic() < deadline:
        # A thread that waits for Python's lock gets it now. To others it looks like one that has nothing to do, so one
        # look is not enough.
        time.sleep(0.002)
        quiet = 0 if _is_any_running() else quiet + 1


def _is_any_running() -> bool:
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        if name == _NAME and rest.split()[0] == "R":
            return True
    return False
