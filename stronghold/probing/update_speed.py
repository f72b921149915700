"""What AdamW's and Muon's updates take, by the formats of weights and states: of the host, and of a device."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stronghold import native
from stronghold.native import BLOCK, Blocks, Segment
from stronghold.optim.adamw_on_device import adamw_on_device
from stronghold.optim.muon_step import Direction, MomentumSegment, StepSegment
from stronghold.planner.step_bytes import MUON
from stronghold.probing.beside import SmallLayer
from stronghold.probing.caches import all_cache_bytes
from stronghold.probing.operator_speed import dtype_name
from stronghold.probing.rounds import Key, Measure, Sample
from stronghold.probing.stopwatches import DeviceClock

Format = tuple[torch.dtype, str]
"""The dtype of weights, and the name of AdamW's moments or of Muon's momentum."""
ELEMENTS = 8 * 2**20
SEGMENTS = 2
"""Tensors over which the elements are dealt out."""
STATES_BYTES = {"fp32": 8, "8bit": 2, MUON: 6}
"""Of a weight's states, and of Muon's step."""
MOST_MEMORY = 1 / 16
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


class AdamWUpdate:
    """One update of ELEMENTS weights by AdamW."""

    def __init__(self, dtype: torch.dtype, states: str, device: torch.device) -> None:
        self.segments = segments(dtype, states, ELEMENTS, device)
        self.grads = [one.grad for one in self.segments]

    def on_host(self, threads: int) -> None:
        native.adamw(self.segments, threads=threads)

    def on_device(self) -> None:
        adamw_on_device(self.segments)


class MuonUpdate:
    """One update of ELEMENTS weights by Muon, as two matrices, without the iteration in between."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        its = segments(dtype, "fp32", ELEMENTS, device)
        self.grads = [one.grad for one in its]
        self.momenta: list[MomentumSegment] = []
        self.steps: list[StepSegment] = []
        for one in its:
            values = torch.empty(one.weight.numel(), dtype=torch.bfloat16, device=device)
            direction = Direction(values, coefficients=(), steps=0, eps=0.0)
            self.momenta.append(
                MomentumSegment(
                    direction=direction,
                    values=values,
                    grad=one.grad,
                    grad_remainder=None,
                    momentum_buffer=torch.full_like(one.weight, 1e-3, dtype=torch.float32),
                    momentum=0.95,
                    nesterov=True,
                    last=False,
                )
            )
            self.steps.append(
                StepSegment(
                    direction=direction, values=values, weight=one.weight, remainder=one.remainder, lr=1e-4, decay=1e-5
                )
            )

    def on_host(self, threads: int) -> None:
        for momentum in self.momenta:
            momentum.run(threads)
        for step in self.steps:
            step.run(threads)

    def on_device(self) -> None:
        self.on_host(1)


def update_of(dtype: torch.dtype, states: str, device: torch.device) -> AdamWUpdate | MuonUpdate:
    """Returns the update of weights in ``dtype`` whose states have that name, with tensors on ``device``."""
    return MuonUpdate(dtype, device) if states == MUON else AdamWUpdate(dtype, states, device)


class HostUpdates:
    """Updates on the host with as many threads as the optimizer uses, alone and beside a layer's computation.

    ``formats`` are those of weights and states.
    """

    def __init__(self, clock: DeviceClock, formats: Sequence[Format]) -> None:
        self._clock, self._formats = clock, formats
        cores = native.usable_cores()
        self._threads = cores if clock.device.torch_device.type == "cpu" else max(1, cores - 1)

    def measures(self) -> list[Measure]:
        return [
            Measure(f"updates in {dtype_name(dtype)} with {_states_name(states)}", self._one(dtype, states))
            for dtype, states in self._formats
        ]

    def _one(self, dtype: torch.dtype, states: str) -> Sample:
        format_name = f"{dtype_name(dtype)}+{states}"
        count = _so_many(dtype, states, formats=len(self._formats))
        its = itertools.cycle([update_of(dtype, states, torch.device("cpu")) for _ in range(count)])
        layer = SmallLayer(dtype, self._clock)

        def sample() -> Mapping[Key, float]:
            begin_s = time.perf_counter()
            self._update(next(its))
            self._update(next(its))
            alone_s = (time.perf_counter() - begin_s) / 2
            layer_s = layer.timed(BESIDE_S / 2)
            beside_s, update_s = layer.timed_beside(lambda: self._update(next(its)), BESIDE_S, least=2)
            found: dict[Key, float] = {
                ("update", format_name, "alone"): 1e9 * alone_s / ELEMENTS,
                ("update", format_name, "beside_compute"): 1e9 * max(update_s, alone_s) / ELEMENTS,
            }
            if states != MUON:  # one number for all formats: AdamW's, which a plan for Muon does not ask for on a host
                found[("compute_beside_update",)] = max(1.0, beside_s / layer_s)
            return found

        return sample

    def _update(self, its: AdamWUpdate | MuonUpdate) -> None:
        if self._clock.device.is_host:  # else the device finds the gradients' squares
            native.squared_norms(its.grads, threads=self._threads)
        its.on_host(self._threads)


class DeviceUpdates:
    """Updates of resident layers, by the device."""

    def __init__(self, clock: DeviceClock, formats: Sequence[Format]) -> None:
        self._clock, self._formats = clock, formats

    def measures(self) -> list[Measure]:
        return [
            Measure(
                f"updates on the device in {dtype_name(dtype)} with {_states_name(states)}", self._one(dtype, states)
            )
            for dtype, states in self._formats
        ]

    def _one(self, dtype: torch.dtype, states: str) -> Sample:
        its = update_of(dtype, states, self._clock.device.torch_device)

        def sample() -> Mapping[Key, float]:
            seconds = self._clock.timed(its.on_device)
            return {("device_update", f"{dtype_name(dtype)}+{states}"): 1e9 * seconds / ELEMENTS}

        return sample


def _so_many(dtype: torch.dtype, states: str, *, formats: int) -> int:
    """Returns how many updates take turns, so that what the next one works on is in no cache, as in training.

    Those of all ``formats`` take no more than MOST_MEMORY of the host's.
    """
    element_bytes = 2 * dtype.itemsize + (2 if dtype is torch.bfloat16 else 0) + STATES_BYTES[states]
    out_of_caches = 2 * all_cache_bytes(torch.device("cpu")) / (element_bytes * ELEMENTS)
    most = MOST_MEMORY * native.host_bytes() / (formats * element_bytes * ELEMENTS)
    return max(1, math.ceil(min(out_of_caches, most)))


def _states_name(states: str) -> str:
    return "Muon's momentum" if states == MUON else f"{states} moments"
