"""What ends a run before its last step: a signal, or that nobody reads what it shows any more."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from stronghold.lab.command import INTERRUPTED

HUNG_UP = 128 + signal.SIGHUP
"""The exit code of a run whose terminal or reader has gone, as shells have it for SIGHUP."""


class Stop:
    """Whether a run is to end after the step under way, and the exit code that it then has."""

    def __init__(self) -> None:
        self.asked = False
        self.exit_code = INTERRUPTED

    def ask(self, exit_code: int) -> None:
        """Asks for the end; the first who does decides the exit code."""
        if not self.asked:
            self.asked, self.exit_code = True, exit_code


class Output:
    """The standard output, which a run outlasts: when its terminal or its reader has gone, ``stop`` is asked for."""

    def __init__(self, stop: Stop) -> None:
        self._file: TextIO = sys.stdout
        self._stop = stop

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise error
        self._stop.ask(HUNG_UP)
        _silence(self._file.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def taking_signals(stop: Stop, *, first: bool = True, alone: bool = True) -> Iterator[None]:
    """Has SIGINT, SIGTERM and, where it is not ignored as by nohup, SIGHUP ask for ``stop`` while the block runs.

    A second SIGINT or SIGTERM ends the process at once. A second SIGHUP does not: when a terminal is closed, the shell
    sends one and the system another. The ``first`` of several processes tells; if they are not ``alone``, the launcher
    passes on to them what the terminal has sent already: within a second that is the first signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may take signals
        return
    asked_s = 0.0
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def take(number: int, _: Any) -> None:
        nonlocal asked_s
        hung_up = number == signal.SIGHUP
        if hung_up:
            for terminal in terminals:  # which may be gone: to write there would be an error
                _silence(terminal)
        if not stop.asked:
            stop.ask(HUNG_UP if hung_up else INTERRUPTED)
            asked_s = time.monotonic()
            if first and not (hung_up and 2 in terminals):  # print is not safe in a handler
                os.write(2, b"\nending after this step; once more to quit at once\n")
        elif not hung_up and (alone or time.monotonic() - asked_s > 1):
            os._exit(INTERRUPTED)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, take) for number in numbers}
    try:
        yield
    finally:
        hung_up = stop.asked and stop.exit_code == HUNG_UP
        for number, handler in before.items():  # the system's own SIGHUP may come behind the shell's, as late as now
            signal.signal(number, signal.SIG_IGN if hung_up and number == signal.SIGHUP else handler)


@contextmanager
def ending_at_signals() -> Iterator[None]:
    """Has SIGTERM and, where it is not ignored as by nohup, SIGHUP leave the block by SystemExit, as Ctrl-C does.

    For what is measured between processes of its own and in folders of its own: at the system's own end by these
    signals the folders would stay.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may take signals
        return

    def end(number: int, _: Any) -> None:
        sys.exit(HUNG_UP if number == signal.SIGHUP else INTERRUPTED)

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _silence(number: int) -> None:
    """Has what is written to a descriptor go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
