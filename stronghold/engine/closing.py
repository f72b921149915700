"""The end of an offloaded model: its threads, memory, locks and files are given back."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from stronghold.device import Stream
from stronghold.errors import OffloadedModelError
from stronghold.native import hold_tensor_heap
from stronghold.store import Store

if TYPE_CHECKING:
    from stronghold.engine.engine import Engine


def end_with(engine: Engine, *, own: bool) -> weakref.finalize:
    """Returns what ends the streams of ``engine`` and closes its store when it is called, or ``engine`` is gone.

    What was given to the streams is carried out before. Those of a device that is not the engine's ``own`` go on. A
    replica does not wait for others that may be gone: its threads end by themselves. Until then the memory of tensors
    on the CPU is from our own heap, where they are what layers compute with.
    """
    streams: list[Stream] = []
    if engine.replicas.world_size == 1:
        streams = [*engine.device.streams, *engine.updates.streams, *engine.store.streams]
        streams += engine.activations.streams if engine.activations else []
    heap = hold_tensor_heap(engine) if engine.device.is_host else None
    end = weakref.finalize(engine, _end, streams, engine.store, heap, own, os.getpid())
    end.atexit = False  # then the streams and the store see to it themselves
    return end


def _end(streams: Sequence[Stream], store: Store, heap: weakref.finalize | None, own: bool, process: int) -> None:
    if os.getpid() != process:
        return  # a child of fork has neither the threads nor the directory
    for stream in streams:
        stream.end() if own else stream.wake()
    # What a stream's thread lets go of last it cannot wait for.
    if not any(stream.is_thread(threading.current_thread()) for stream in streams):
        for stream in streams:
            stream.drain()
    store.close()
    if heap is not None:
        heap()


def close_engine(engine: Engine) -> None:
    """Waits for the updates of ``engine``, and gives back all that it and its optimizer hold.

    Raises what made an update fail, when all is given back; OffloadedModelError in a backward pass.
    """
    if engine.closed:
        return
    if torch._C._current_graph_task_id() != -1:
        raise OffloadedModelError("a model cannot be closed in its backward pass; call close() when backward() is over")
    engine.turns.check()
    try:
        engine.close_backward()
        for unit in engine.units:
            unit.wait_on_host()
    finally:
        engine.release()
