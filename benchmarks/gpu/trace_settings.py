"""The settings that trace_steps.py goes over, and how much memory each leaves to activations."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from compare_parts import Course, fit
from compare_parts import Setting as Compared

from stronghold.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The reference GPT: by default 1.717 B parameters in bf16."""

    layers: int = 32
    hidden: int = 2048
    heads: int = 16
    vocabulary: int = 51200
    sequence: int = 1024
    dtype: str = "bf16"


SMALL = Shape(layers=6, hidden=128, heads=4, vocabulary=512, sequence=64)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to train ``batch`` samples; with a ``cap``, in bytes, as many resident layers as go under it.

    ``planned`` is what offload itself chooses under the cap, ``compiled`` with layers compiled.
    """

    batch: int
    window: int | None = 3
    update: str = "in_backward"
    states: str = "fp32"
    activations: str = "recompute"
    micro_batch: int | None = None
    cap: int | None = None
    planned: bool = False
    compiled: bool = False

    @property
    def name(self) -> str:
        """Its name in words."""
        words = [
            f"batch {self.batch}",
            f"window {self.window}" if self.cap is None else f"cap {format_bytes(self.cap)}",
        ]
        words += ["planned"] if self.planned else [self.update]
        words += ["compiled"] if self.compiled else []
        words += ["8-bit"] if self.states == "8bit" else []
        words += [f"activations {self.activations}"] if self.activations != "recompute" else []
        words += [f"{self.micro_batch} at a time"] if self.micro_batch else []
        return ", ".join(words)


def settings_of(shape: Shape, batches: tuple[int, int], cap: int) -> list[Setting]:
    """Returns the settings in their order: the goals' first, and all of one batch together."""
    large, few = batches
    first = Setting(batch=large, window=min(3, shape.layers))
    budget = replace(first, window=None, cap=cap)
    planned = replace(budget, update="auto", planned=True)
    return [
        budget,
        first,
        planned,
        replace(first, compiled=True),
        replace(budget, update="deferred"),
        replace(first, update="deferred"),
        replace(first, states="8bit"),
        replace(first, window=min(6, shape.layers)),
        replace(first, window=min(2, shape.layers)),
        replace(first, activations="host", micro_batch=max(1, large // 4)),
        Setting(batch=few, window=min(6, shape.layers), update="deferred"),
        Setting(batch=few, window=min(6, shape.layers)),
        Setting(batch=few, window=None, cap=cap),
        replace(planned, batch=few),
        Setting(batch=few, window=None, cap=cap, compiled=True),
    ]


def offload_settings(shape: Shape, setting: Setting, *, on_host: bool = False) -> dict[str, Any]:
    """Returns what ``stronghold.offload`` is called with; ``on_host`` the device has no memory of its own to limit."""
    given: dict[str, Any] = {"activations": setting.activations, "micro_batch": setting.micro_batch}
    if setting.compiled:
        given["compile"] = True
    if setting.planned:
        batch = torch.empty(setting.batch, shape.sequence, dtype=torch.long, device="meta")
        inputs = {"inputs": {"input_ids": batch, "labels": batch}}
        return inputs if on_host else inputs | {"device_memory": setting.cap}
    if setting.cap is None:
        return given | {"window": setting.window}
    course = Course(
        hidden=shape.hidden,
        heads=shape.heads,
        vocabulary=shape.vocabulary,
        sequence=shape.sequence,
        dtype=shape.dtype,
    )
    compared = Compared(part="methods", method="stronghold", layers=shape.layers, batch=setting.batch, cap=setting.cap)
    fitted = fit(course, compared)
    # A small model's activations are nothing beside what an allocator cannot use, which the estimate has in it.
    room = max(setting.cap // 4, setting.cap - fitted.reserve)
    chosen = {"activations": fitted.activations, "micro_batch": fitted.micro_batch}
    return given | chosen | {"resident": "auto", "device_memory": room}


def call_of(shape: Shape, setting: Setting | None, batch: int) -> dict[str, Any]:
    """Returns what a measurement is known by; ``setting`` is None for plain PyTorch, all on the device."""
    chosen = {"method": "plain", "batch": batch} if setting is None else {"method": "stronghold", **asdict(setting)}
    return {**asdict(shape), **chosen}
