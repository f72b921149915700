"""Failures of the disk on demand, for tests."""

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass

from stronghold.native.extension import _C

_KINDS = ("open", "read", "write", "reserve", "sync")
_WHATS = ("short", "flip", "eof", "delay", "kill")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Lets system calls go wrong: the ``nth``, counted from 1, of those of one ``kind``, and ``times`` - 1 behind it.

    ``kind`` is open, read, write, reserve or sync; only files whose path ends in ``path_ends`` count. ``times`` None is
    for ever. ``what`` is the name of an error (``"EIO"``), with which the call fails having done nothing, or

    - ``"short"``: it moves only the bytes up to ``at_byte`` of what it was asked (None: half of them);
    - ``"flip"``: one bit of byte ``at_byte`` (None: the middle one) is read or written the other way round;
    - ``"eof"``: it reads nothing, as at the file's end;
    - ``"delay"``: it begins ``delay_s`` later;
    - ``"kill"``: it moves what ``"short"`` does, and the process ends by SIGKILL.
    """

    kind: str
    what: str
    nth: int = 1
    times: int | None = 1
    path_ends: str = ""
    at_byte: int | None = None
    delay_s: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"kind must be one of {', '.join(_KINDS)} (got {self.kind!r}); pass one of these")
        if self.what not in _WHATS and not hasattr(errno, self.what):
            raise ValueError(
                f"what must be one of {', '.join(_WHATS)} or an error's name such as 'EIO' (got {self.what!r}); "
                "pass one of these"
            )


def system_of(faults: Sequence[Fault]) -> _C.Faults:
    """Returns system calls that go wrong as ``faults`` say; the first that fits a call counts."""
    return _C.Faults(
        [
            (
                fault.kind,
                fault.nth,
                2**62 if fault.times is None else fault.times,
                os.fsencode(fault.path_ends),
                fault.what if fault.what in _WHATS else "error",
                getattr(errno, fault.what, 0),
                -1 if fault.at_byte is None else fault.at_byte,
                fault.delay_s,
            )
            for fault in faults
        ]
    )
