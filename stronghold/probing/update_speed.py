"""What AdamW's update takes, by formats of weights and moments: on the host, beside computing, on the device."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stronghold import native
from stronghold.native import BLOCK, Blocks, Segment
from stronghold.optim.adamw_on_device import adamw_on_device
from stronghold.probing.operator_speed import dtype_name
from stronghold.probing.rounds import Key, Measure, Sample
from stronghold.probing.stopwatches import DeviceClock

Format = tuple[torch.dtype, str]
"""The dtype of weights and the states' name."""
ELEMENTS = 8 * 2**20
SEGMENTS = 2
"""Tensors over which the elements are dealt out."""
HOST_LAYER, DEVICE_LAYER = (512, 512), (4096, 2048)
"""Rows and width of what is computed beside."""
BESIDE_S = 0.15
"""How long both are at work."""


def segments(dtype: torch.dtype, states: str, elements: int, device: torch.device) -> list[Segment]:
    """Returns what an update of so many weights works on, in SEGMENTS tensors."""
    count = elements // SEGMENTS

    def filled(value: float, of: torch.dtype) -> Tensor:
        return torch.full((count,), value, dtype=of, device=device)

    def moment(value: float) -> Tensor | Blocks:
        if states == "fp32":
            return filled(value, torch.float32)
        exponents = torch.zeros(-(-count // BLOCK), dtype=torch.uint8, device=device)
        return Blocks(codes=torch.zeros(count, dtype=torch.uint8, device=device), exponents=exponents)

    return [
        Segment(
            weight=filled(0.5, dtype),
            remainder=torch.zeros(count, dtype=torch.int16, device=device) if dtype is torch.bfloat16 else None,
            grad=filled(1e-3, dtype),
            exp_avg=moment(1e-3),
            exp_avg_sq=moment(1e-6),
            lr=1e-4,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=0.1,
            step=10,
        )
        for _ in range(SEGMENTS)
    ]


class HostUpdates:
    """Updates on the host with as many threads as the optimizer uses, alone and beside a layer's computation.

    ``formats`` are those of weights and moments.
    """

    def __init__(self, clock: DeviceClock, formats: Sequence[Format]) -> None:
        self._clock, self._formats = clock, formats
        cores = native.usable_cores()
        self._threads = cores if clock.device.torch_device.type == "cpu" else max(1, cores - 1)

    def measures(self) -> list[Measure]:
        return [
            Measure(f"updates in {dtype_name(dtype)} with {states} moments", self._one(dtype, states))
            for dtype, states in self._formats
        ]

    def _one(self, dtype: torch.dtype, states: str) -> Sample:
        format_name = f"{dtype_name(dtype)}+{states}"
        its = segments(dtype, states, ELEMENTS, torch.device("cpu"))
        layer = SmallLayer(dtype, self._clock)

        def sample() -> Mapping[Key, float]:
            begin_s = time.perf_counter()
            self._update(its)
            self._update(its)
            alone_s = (time.perf_counter() - begin_s) / 2
            layer_s = layer.timed(BESIDE_S / 2)
            update_s, beside_s = self._together(its, layer)
            return {
                ("update", format_name, "alone"): 1e9 * alone_s / ELEMENTS,
                ("update", format_name, "beside_compute"): 1e9 * max(update_s, alone_s) / ELEMENTS,
                ("compute_beside_update",): max(1.0, beside_s / layer_s),
            }

        return sample

    def _update(self, its: Sequence[Segment]) -> None:
        if self._clock.device.is_host:  # else the device finds the gradients' squares
            native.squared_norms([one.grad for one in its], threads=self._threads)
        native.adamw(its, threads=self._threads)

    def _together(self, its: Sequence[Segment], layer: SmallLayer) -> tuple[float, float]:
        """Returns the seconds of one update and of one layer while both go on."""
        ends: list[float] = []
        stopped = threading.Event()

        def update() -> None:
            while not stopped.is_set():
                ends.append(time.perf_counter())
                self._update(its)
            ends.append(time.perf_counter())

        thread = threading.Thread(target=update, name="stronghold-probe", daemon=True)
        thread.start()
        try:
            beside_s = layer.timed(BESIDE_S, until=lambda: len(ends) > 2)
            done = len(ends)
        finally:
            stopped.set()
            thread.join()
        counted = ends[: max(2, done)]  # the last began beside the layer, and ended alone
        return (counted[-1] - counted[0]) / (len(counted) - 1), beside_s


class SmallLayer:
    """What a layer computes, in small: two products and an activation."""

    def __init__(self, dtype: torch.dtype, clock: DeviceClock) -> None:
        self._clock = clock
        rows, width = HOST_LAYER if clock.device.is_host else DEVICE_LAYER
        device = clock.device.torch_device
        self._x = torch.full((rows, width), 0.5, dtype=dtype, device=device)
        self._up = torch.full((width, 4 * width), 1e-3, dtype=dtype, device=device)
        self._down = torch.full((4 * width, width), 1e-3, dtype=dtype, device=device)

    def compute(self) -> None:
        torch.mm(torch.nn.functional.gelu(torch.mm(self._x, self._up)), self._down)

    def timed(self, least_s: float, until=lambda: True) -> float:
        """Returns the seconds of one layer, computed over and over for ``least_s`` and ``until`` that is true."""
        calls, begin_s = 0, time.perf_counter()
        while (taken_s := time.perf_counter() - begin_s) < least_s or not until():
            self.compute()
            self._clock.wait()
            calls += 1
        return taken_s / max(1, calls)


class DeviceUpdates:
    """Updates of resident layers, by the device."""

    def __init__(self, clock: DeviceClock, formats: Sequence[Format]) -> None:
        self._clock, self._formats = clock, formats

    def measures(self) -> list[Measure]:
        return [
            Measure(f"updates on the device in {dtype_name(dtype)}", self._one(dtype, states))
            for dtype, states in self._formats
        ]

    def _one(self, dtype: torch.dtype, states: str) -> Sample:
        its = segments(dtype, states, ELEMENTS, self._clock.device.torch_device)

        def task() -> None:
            for one in its:
                adamw_on_device(one)

        def sample() -> Mapping[Key, float]:
            seconds = self._clock.timed(task)
            return {("device_update", f"{dtype_name(dtype)}+{states}"): 1e9 * seconds / ELEMENTS}

        return sample
