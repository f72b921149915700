"""The exceptions that stronghold raises on its own account."""

from collections.abc import Mapping
from typing import Any


class StrongholdError(RuntimeError):
    """The base of all of them: catch it to catch whatever stronghold refuses or reports."""


class BudgetError(StrongholdError, ValueError):
    """A memory budget cannot hold what was asked for.

    Raised before training starts and before any state has changed; the message has the bytes needed, the
    bytes given and what would fit. ``needed`` holds, of a plan, the least bytes of each memory that would do, and
    ``lacking`` the part of the message that says what is short.
    """

    def __init__(self, message: str, needed: Mapping[str, int] | None = None, lacking: str = "") -> None:
        super().__init__(message)
        self.needed, self.lacking = dict(needed or {}), lacking or message


class NonFiniteGradientError(StrongholdError):
    """A gradient holds NaN or infinity, and the user chose to be told rather than to have the step skipped.

    Raised before any parameter or optimizer state of that step has changed. ``found`` is the part of the message that
    says what is wrong, for callers whose users have other remedies than the optimizer's settings.
    """

    def __init__(self, found: str, remedy: str = "") -> None:
        super().__init__(found + remedy)
        self.found = found


class OffloadedModelError(StrongholdError):
    """An offloaded model, or an optimizer over one, is used in a way that its placement forbids.

    Raised, for example, when a parameter was added or replaced after ``offload``, when an optimizer was built
    on another model's parameters, or on a second ``backward()`` under ``update="in_backward"``.
    """


class StoreError(StrongholdError):
    """A store's directory cannot be used: it belongs to another run or another model, or is not whole.

    Raised before anything that was in it has changed.
    """


class DiskError(StrongholdError, OSError):
    """The disk refused or failed an operation: ``operation`` on ``length`` bytes at byte ``offset`` of ``path``.

    ``operation`` is open, read, write, reserve or sync. ``errno`` is the system's number for what went wrong, None
    where no system call failed: the file ended before the data did, or the disk was closed, or belongs to the process
    that this one was forked from. What a failed read leaves in memory, and a failed write in the file, is undefined.
    """

    def __init__(
        self,
        message: str,
        operation: str = "",
        path: str = "",
        offset: int = 0,
        length: int = 0,
        errno: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.operation, self.path, self.offset, self.length = message, operation, path, offset, length
        self.errno = errno

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.operation, self.path, self.offset, self.length, self.errno)


class CheckpointError(StrongholdError):
    """A checkpoint cannot be loaded: it is absent, incomplete, of another format, or of another model.

    Raised before anything has changed, unless the message says otherwise. Bytes that are not those written raise
    CorruptionError.
    """


class CorruptionError(StrongholdError):
    """What was read is not what was written: ``length`` bytes at byte ``offset`` of ``path`` have another checksum.

    ``expected`` and ``found`` are CRC-32C.
    """

    def __init__(
        self, message: str, path: str = "", offset: int = 0, length: int = 0, expected: int = 0, found: int = 0
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path, self.offset, self.length, self.expected, self.found = path, offset, length, expected, found

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.path, self.offset, self.length, self.expected, self.found)


class ParallelError(StrongholdError):
    """Stages and processes do not fit the model, the batch or one another.

    Raised before a step, by all processes alike; ``ours`` is False in those that are to end for it without a word,
    because another one has it to say.
    """

    def __init__(self, message: str, *, ours: bool = True) -> None:
        super().__init__(message)
        self.ours = ours


class LostProcessError(ParallelError):
    """Another of the processes that train the model has ended, and the message names it.

    Training can go on from the last checkpoint.
    """
