"""What probe.py measures: one function for each kind, which returns what a record holds beside its call."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch
from meanwhile import Asked

from stronghold.device import Common, open_device
from stronghold.native import stream

Outcome = dict[str, Any]
BURST = 500
"""Kernels launched without a wait between: below what a stream's queue takes before a launch blocks."""
REPEATS = 3


def timed(
    task: Callable[[], object],
    device: torch.device,
    least_s: float,
    *,
    meanwhile: Callable[[], object] | None = None,
) -> list[float]:
    """Returns the seconds of one ``task``, some times over, each the mean of as many as take ``least_s`` together.

    ``meanwhile`` is called once, between the first of them and the second.
    """

    def run(count: int) -> float:
        synchronize(device)
        begin_s = time.perf_counter()
        for _ in range(count):
            task()
        synchronize(device)
        return time.perf_counter() - begin_s

    run(1)  # what is done once: loading a kernel, taking a workspace
    count, took_s = 1, run(1)
    while took_s < least_s and count < 2**16:
        count = max(2 * count, min(64 * count, round(1.2 * count * least_s / max(took_s, 1e-9))))
        took_s = run(count)
    if meanwhile is not None:
        meanwhile()
    return [took_s / count, *(run(count) / count for _ in range(REPEATS - 1))]


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _stream(device: torch.device) -> torch.Stream | None:
    return None if device.type == "cpu" else torch.Stream(device)


def _in(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else stream


# ---- the link ----


def link(device: torch.device, least_s: float, *, way: str, memory: str, bytes: int) -> Outcome:
    """Copies between the host and the device, ``way`` "up", "down" or "both"; GB/s of each way, by 1e9."""
    opened = open_device(device)
    pairs, buffers = [], []
    for one in ("up", "down") if way == "both" else (way,):
        buffer = opened.host_buffer(bytes, pinned=memory == "pinned")
        buffer.flat.fill_(1)
        there = torch.ones(bytes, dtype=torch.uint8, device=device)
        buffers.append(buffer)
        pairs.append((_stream(device), *((there, buffer.flat) if one == "up" else (buffer.flat, there))))

    def copy() -> None:
        for beside, target, source in pairs:
            with _in(beside):
                target.copy_(source, non_blocking=True)

    synchronize(device)  # the filling is in another stream
    seconds = timed(copy, device, least_s)
    pinned = all(buffer.pinned for buffer in buffers)
    return {"seconds": seconds, "gb_per_s": bytes / median(seconds) / 1e9, "pinned": pinned}


def pinning(device: torch.device, least_s: float, *, touched: bool, bytes: int) -> Outcome:
    """Pins host memory and gives it back; seconds per GiB. ``touched`` has its pages there before."""
    opened = open_device(device)
    if opened.is_host:
        return {"error": "a device whose memory is the host's pins nothing"}
    seconds = []
    for _ in range(REPEATS):
        memory = Common(mmap.mmap(-1, bytes), users=1)
        if touched:
            torch.frombuffer(memory.mapped, dtype=torch.uint8).fill_(1)
        begin_s = time.perf_counter()
        buffer = opened.host_buffer(bytes, memory=memory)
        seconds.append(time.perf_counter() - begin_s)
        if not buffer.pinned:
            return {"error": f"the system refused to pin {bytes} bytes"}
        del buffer, memory
    return {"seconds": seconds, "s_per_gib": median(seconds) * 2**30 / bytes}


# ---- memory ----


def host_memory(device: torch.device, least_s: float, *, threads: int, elements: int) -> Outcome:
    """Moves what an update moves, without its arithmetic: 28 bytes an element."""
    tensors = [torch.ones(elements) for _ in range(4)]
    seconds = timed(lambda: stream(*tensors, threads=threads), torch.device("cpu"), least_s)
    return {"seconds": seconds, "gb_per_s": 28 * elements / median(seconds) / 1e9}


def device_memory(device: torch.device, least_s: float, *, bytes: int) -> Outcome:
    """Copies within the device: each byte is read and written."""
    source, target = (torch.ones(bytes, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = timed(lambda: target.copy_(source), device, least_s)
    return {"seconds": seconds, "gb_per_s": 2 * bytes / median(seconds) / 1e9}


# ---- computing ----


def product(device: torch.device, least_s: float, *, kind: str, m: int, k: int, n: int, for_s: float = 0.0) -> Outcome:
    """Multiplies (m, k) by (k, n), ``kind`` "bf16", "fp32" or "tf32", for ``for_s`` seconds if that is longer.

    What nvidia-smi says meanwhile of clocks, power and the link is "while", of those that take ``for_s``.
    """
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(2**20, generator=generator).to(dtype)  # zeros would take less power, and be faster

    def filled(rows: int, columns: int) -> torch.Tensor:
        flat = block.to(device).repeat(-(-rows * columns // block.numel()))
        return flat[: rows * columns].view(rows, columns)

    one, other = filled(m, k), filled(k, n)
    result = torch.empty(m, n, dtype=dtype, device=device)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    asked: list[Asked] = []
    ask = (lambda: asked.append(Asked(device))) if for_s and device.type == "cuda" else None
    try:
        seconds = timed(lambda: torch.mm(one, other, out=result), device, max(least_s, for_s), meanwhile=ask)
    finally:
        torch.set_float32_matmul_precision(before)
    found = {"seconds": seconds, "tflops": 2 * m * k * n / median(seconds) / 1e12}
    return found | ({"while": asked[0].answer()} if asked else {})


def launch(device: torch.device, least_s: float, *, what: str) -> Outcome:
    """Launches what takes no time, a burst at once; microseconds of the launching thread each, and with the device's.

    ``what`` is a "kernel", an event's "record", a stream's "wait" for one, a "product" by autograd's way or a "copy" of
    four bytes from pinned memory.
    """
    x, small = torch.ones(1, device=device), torch.ones(64, 64, device=device)
    tasks: dict[str, Callable[[], object]] = {"kernel": lambda: x.add_(1), "product": lambda: torch.mm(small, small)}
    if device.type != "cpu":
        beside, event = torch.Stream(device), torch.Event(device)
        here = torch.accelerator.current_stream(device)
        event.record(here)
        host = open_device(device).host_buffer(4).view(0, (1,), torch.float32)
        tasks |= {
            "record": lambda: event.record(here),
            "wait": lambda: beside.wait_event(event),
            "record and wait": lambda: (event.record(here), beside.wait_event(event)),
            "copy": lambda: x.copy_(host, non_blocking=True),
        }
    if what not in tasks:
        return {"error": "a device whose memory is the host's has no streams"}
    task, host_s, whole_s = tasks[what], [], []
    for _ in range(REPEATS + 1):  # the first is not counted
        synchronize(device)
        begin_s = time.perf_counter()
        for _ in range(BURST):
            task()
        host_s.append((time.perf_counter() - begin_s) / BURST)
        synchronize(device)
        whole_s.append((time.perf_counter() - begin_s) / BURST)
    return {"us": 1e6 * median(host_s[1:]), "us_with_device": 1e6 * median(whole_s[1:])}


PARTS: dict[str, Callable[..., Outcome]] = {
    "link": link,
    "pinning": pinning,
    "host memory": host_memory,
    "device memory": device_memory,
    "product": product,
    "launch": launch,
}
