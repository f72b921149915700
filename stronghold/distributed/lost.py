"""What is done about a process that is lost: it is told of in one line, and its launcher need not wait for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

import psutil

from stronghold.distributed.activity import known_process
from stronghold.errors import LostProcessError, ParallelError

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def in_one_line(hook: Hook) -> Hook:
    """Returns an excepthook that is ``hook``, but for errors whose traceback shows where this process waited.

    That another process is lost is one line, in the process that is to tell it, and nothing in the others.
    """

    def tell(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, ParallelError) and not error.ours:
            return
        if isinstance(error, LostProcessError):
            print(f"stronghold: error: {error}", file=sys.stderr, flush=True)
            return
        hook(kind, error, traceback)

    return tell


def kill_stopped(known: str | None) -> None:
    """Kills a lost process of this machine that is stopped, by its ``identity`` as text.

    It cannot end by itself, and torchrun, which ends all when the first has ended, waits half a minute for it.
    """
    try:
        process = known_process(known)
        if process is not None and process.status() == psutil.STATUS_STOPPED:
            process.kill()
    except psutil.Error:  # it has ended, or is another user's: then it is the launcher's
        return
