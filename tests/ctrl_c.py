"""Ctrl-C at each place of the package where Python would see it, one after another."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import stronghold

PACKAGE = str(Path(stronghold.__file__).parent)
LOOKED = {dis.opmap[name] for name in ("CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME") if name in dis.opmap}
LOOKED_WHERE_TAKEN = {number for name, number in dis.opmap.items() if "JUMP_BACKWARD" in name}
"""Behind these instructions the interpreter looks for signals."""


class CtrlC:
    """Raises KeyboardInterrupt at one of the places that a thread passes in ``rooms``: its ``number``, from 0."""

    def __init__(self, number: int, rooms: Sequence[str] = ("",)) -> None:
        self.number = number
        self._rooms = tuple(f"{PACKAGE}/{room}" for room in rooms)
        self.passed = 0
        self.place: str | None = None
        """Where it was raised."""
        self._last: tuple[FrameType, int] | None = None

    @contextmanager
    def comes(self) -> Iterator[CtrlC]:
        """Has it come in the block, out of which it goes."""
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 has opcodes traced where a frame had asked before
        sys.settrace(self._called)
        try:
            yield self
        except KeyboardInterrupt:
            assert self.place is not None
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._last = None
        if not frame.f_code.co_filename.startswith(self._rooms):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._passes

    def _passes(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "opcode":
            self._last = None
            return self._passes
        last, self._last = self._last, (frame, frame.f_lasti)
        if last is not None and last[0] is frame and _is_looked_for(frame.f_code, last[1], frame.f_lasti):
            self.passed += 1
            if self.passed == self.number + 1:
                sys.settrace(None)
                self.place = f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._passes


def _is_looked_for(code: CodeType, last: int, here: int) -> bool:
    """Whether a signal is looked for between the instruction at ``last`` and the next one, which is the one ``here``.

    It is raised at the first of them. Where the block that they are in ends between them, what is raised here would not
    be seen by what ends that.
    """
    instruction = code.co_code[last]
    if instruction not in LOOKED and not (instruction in LOOKED_WHERE_TAKEN and here < last):
        return False
    return _handler(code, last) == _handler(code, here)


def _handler(code: CodeType, place: int) -> int | None:
    inside = [entry.target for entry in dis._parse_exception_table(code) if entry.start <= place < entry.end]  # type: ignore[attr-defined]
    return inside[-1] if inside else None
