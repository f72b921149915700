"""One thread at a time computes with an offloaded model: the others wait for a layer, and are refused a backward pass.

A layer's computation is one call, and a lock is held for it. A backward pass is many calls of autograd's, in a thread
of its choice, whose end it tells of only where nothing failed: it is under way as long as autograd keeps the callback
for its end.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from stronghold.errors import OffloadedModelError
from stronghold.unit import opaque

_ENDING_S = 0.2
"""How long a pass that has just failed may take to be gone in the thread that ran it."""
_LAYER_S = 60.0
"""How long a backward pass waits for another thread's layer: for ever, where that waits for the pass in its turn."""


class Turns:
    """Whose turn it is."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._until_released = _Release(self._lock)
        self._pass: weakref.ref[_Pass] | None = None
        self._thread = 0
        self._task = -1

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is under way."""
        return self._pass is not None and self._pass() is not None

    @property
    def own_pass(self) -> bool:
        """Whether a backward pass is under way in this thread."""
        return self._thread == threading.get_ident() and self.in_backward

    @property
    def elsewhere(self) -> bool:
        """Whether a backward pass is under way in another thread."""
        return self._thread != threading.get_ident() and self.in_backward

    def check(self) -> None:
        """Raises OffloadedModelError where another thread is in a backward pass."""
        deadline = time.monotonic() + _ENDING_S
        while self.elsewhere:
            if time.monotonic() > deadline:
                raise _refusal()
            time.sleep(0.001)

    def taken(self) -> AbstractContextManager[None]:
        """Runs the block while no other thread computes. Raises OffloadedModelError as :meth:`check` does."""
        while True:
            self.check()
            self._lock.acquire()
            if not self.elsewhere:
                return self._until_released
            self._lock.release()

    def taken_in_backward(self) -> AbstractContextManager[None]:
        """The same for what autograd calls, where the thread that called backward() may be waiting."""
        if not self._lock.acquire(timeout=_LAYER_S):
            raise _refusal()
        if self.elsewhere:
            self._lock.release()
            raise _other_device() if torch._C._current_graph_task_id() == self._task else _refusal()
        return self._until_released

    def begin(self, end: Callable[[], None]) -> None:
        """Notes that a backward pass has begun in this thread; ``end`` is called when it has ended without an error."""
        begun = _Pass(end)
        self._pass, self._thread = weakref.ref(begun), threading.get_ident()
        self._task = torch._C._current_graph_task_id()
        torch.autograd.Variable._execution_engine.queue_callback(begun)


class _Release:
    """Releases a lock that is held at the end of a block; contextlib's way takes four times as long."""

    __slots__ = ("_lock",)

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class _Pass:
    """What autograd keeps as long as a backward pass goes on, and calls at its end."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    @opaque
    def __call__(self) -> None:
        self._end()


def _refusal() -> OffloadedModelError:
    return OffloadedModelError(
        "an offloaded model computes in one thread at a time (a backward pass is under way in one, and "
        f"{threading.current_thread().name} uses the model or its gradients); let threads take turns with forward, "
        "backward and step, and call backward() of a loss on a layer's parameters themselves apart from the model's"
    )


def _other_device() -> OffloadedModelError:
    return OffloadedModelError(
        "a backward pass through layers must stay on the device that they compute on (autograd carries out what is on "
        "another one in a thread of its own, beside the layers' backward passes); return a layer's losses on its own "
        "device and copy them outside of the layers, and call backward() of a penalty on a layer's parameters apart "
        "from the model's"
    )
