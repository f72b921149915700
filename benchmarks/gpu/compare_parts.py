"""What compare.py measures: the settings of each part in the order of their calls, and the command of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from stronghold.lab.models.cross_entropy import CHUNK_BYTES
from stronghold.lab.models.gpt import GPTConfig
from stronghold.lab.records.agreement import REFERENCE
from stronghold.units import format_bytes

STRONGHOLD = "stronghold"
DEEPSPEED = ("zero-offload", "zero-infinity", "zero-infinity-nvme")
GOALS = (STRONGHOLD, "zero-offload", "zero-infinity")
"""The methods that a goal is about, called in every round."""
OTHERS = ("l2l", "fsdp-offload", "torchao-offload")
"""Those that are there to be seen beside them, called once."""
FROM_DISK = ("zero-infinity-nvme",)
"""Takes minutes, and comes after all others."""
FITTED = (STRONGHOLD, "l2l")
"""Those that take micro-batches without more traffic for it, and activations on the host."""
UPDATES = ("deferred", "in_backward")


@dataclass(frozen=True, kw_only=True)
class Course:
    """What all calls have in common: the model but for its layers, and how it is trained.

    ``activations``, ``micro_batch`` and ``reserve`` (bytes) are stronghold's, where they are not to be chosen by
    :func:`fit`. The rate is low for there is no warm-up: what two methods round differently must not grow.
    """

    hidden: int = 2048
    heads: int = 16
    vocabulary: int = 51200
    sequence: int = 1024
    dtype: str = "bf16"
    steps: int = 8
    lr: float = 3e-6
    states: str = "fp32"
    device: str = "cuda"
    activations: str | None = None
    micro_batch: int | None = None
    reserve: int | None = None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to train. Without a ``window`` stronghold fills ``cap``, in bytes, with resident layers and slots."""

    part: str
    method: str
    layers: int
    batch: int
    cap: int | None = None
    window: int | None = None
    update: str = "deferred"

    @property
    def name(self) -> str:
        """Its name in words, and of its files."""
        words = [self.part, self.method, f"l-{self.layers}", f"bs-{self.batch}"]
        words += [f"ws-{self.window}"] if self.window is not None else []
        words += [f"cap-{format_bytes(self.cap).replace(' ', '')}"] if self.cap is not None else []
        return "_".join(words + ([self.update] if self.update != "deferred" else []))


class Round(NamedTuple):
    """Calls one after another that are compared with that of ``reference``, which is the first of them."""

    number: int
    reference: Setting
    settings: tuple[Setting, ...]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a part goes over; with ``only`` these methods alone."""

    layers: tuple[int, ...] = (32,)
    batches: tuple[int, ...] = (4,)
    caps: tuple[int | None, ...] = (None,)
    windows: tuple[int, ...] = ()
    updates: tuple[str, ...] = UPDATES
    rounds: int = 2
    only: tuple[str, ...] = ()


def plan(part: str, wanted: Wanted) -> Iterator[Round]:
    """Yields the rounds of ``part``: all that a goal is about once, then again; last what is called once.

    "methods" is every method under every cap, "windows" stronghold through each window, "layers" stronghold on each
    model. Every combination of layers and batch has rounds, and a reference, of its own.
    """
    combinations = list(product(wanted.layers, wanted.batches))
    if part != "methods":
        for number, (layers, batch) in product(range(1, wanted.rounds + 1), combinations):
            ways = product(wanted.caps, wanted.updates, wanted.windows)
            yield _round(part, number, layers, batch, [(STRONGHOLD, *way) for way in ways])
        return
    passes = [(number, GOALS) for number in range(1, wanted.rounds + 1)] + [(1, OTHERS), (1, FROM_DISK)]
    for (number, methods), (layers, batch) in product(passes, combinations):
        chosen = [method for method in methods if not wanted.only or method in wanted.only]
        if not chosen:
            continue
        ways = [
            (method, cap, update, None)
            for cap, method in product(wanted.caps, chosen)
            for update in (wanted.updates if method == STRONGHOLD else UPDATES[:1])
        ]
        yield _round(part, number, layers, batch, ways)


def _round(
    part: str, number: int, layers: int, batch: int, ways: Sequence[tuple[str, int | None, str, int | None]]
) -> Round:
    reference = Setting(part=part, method=REFERENCE, layers=layers, batch=batch)
    settings = [
        replace(reference, method=method, cap=cap, update=update, window=window) for method, cap, update, window in ways
    ]
    return Round(number, reference, tuple(settings))


# ---- what fits ----


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How a method has its activations, and the bytes of a cap that stronghold leaves to them."""

    activations: str = "recompute"
    micro_batch: int | None = None
    reserve: int = 0


def fit(course: Course, setting: Setting) -> Fit:
    """Returns how activations fit three quarters of the cap, the rest being for layers: the simplest way that does.

    Inputs of all layers on the device and each layer over the whole batch; the same a quarter of the batch at a time;
    inputs on the host, which is taken where nothing fits. Methods that do not have these choices begin with the first.
    """
    if setting.method not in FITTED:
        return Fit()
    quarter = max(1, setting.batch // 4)
    fits = []
    for activations, samples in (("recompute", setting.batch), ("recompute", quarter), ("host", quarter)):
        activations, samples = course.activations or activations, course.micro_batch or samples
        needed = activation_bytes(course, setting, activations, samples) if course.reserve is None else course.reserve
        micro_batch = samples if samples < setting.batch else None
        fits.append(Fit(activations=activations, micro_batch=micro_batch, reserve=needed))
    # Resident layers spare copies that are hidden anyway; parts of a batch take launches, which are not: on an H200
    # beside a slow host a quarter at a time took 1.15 s with 11 resident layers, the whole batch 1.04 with none.
    room = math.inf if setting.cap is None else setting.cap * 3 / 4
    return next((one for one in fits if one.reserve <= room), fits[-1])


def fit_tighter(course: Course, setting: Setting, before: Fit) -> Fit | None:
    """Returns what is tried next where ``before`` went beyond the cap; None where there is nothing to try.

    stronghold leaves half as much again to activations, unless it was told how much; DeepSpeed accumulates the
    gradients of parts of the batch, each a quarter of those before.
    """
    if setting.method == STRONGHOLD and setting.window is None and course.reserve is None:
        return replace(before, reserve=before.reserve * 3 // 2)
    samples = before.micro_batch or setting.batch
    if setting.method in DEEPSPEED and samples > 1:
        return replace(before, micro_batch=samples // 4 if samples % 4 == 0 else 1)
    return None


def activation_bytes(course: Course, setting: Setting, activations: str, samples: int) -> int:
    """Returns what a step of the reference GPT takes on the device beside weights, gradient slots and states.

    In units of a layer's input, as the CPU's allocator counts them: each layer keeps its input, or with "keep" 19, or
    with "host" all of them together the slots of four micro-batches; a layer computed again and its backward pass have
    24 at a time, of a micro-batch, and what goes in and comes out of it 2.5. The loss has three chunks of logits, and
    the embedding's gradient thrice in fp32. A tenth and 256 MiB more are for what an allocator cannot use.
    """
    bytes_each = 2 if course.dtype == "bf16" else 4
    unit = setting.batch * course.sequence * course.hidden * bytes_each
    part = min(1.0, samples / setting.batch)
    kept = {"recompute": setting.layers, "keep": 19 * setting.layers, "host": 4 * part}[activations] * unit
    layer = (24 * part + 2.5) * unit
    shape = GPTConfig(layers=setting.layers, hidden=course.hidden, heads=course.heads, vocabulary=course.vocabulary)
    loss = 4 * unit + 3 * CHUNK_BYTES + 3 * 4 * shape.rows * course.hidden
    return round(1.1 * (kept + max(layer, loss))) + 256 * 2**20


# ---- the command ----


def command(course: Course, setting: Setting, fitted: Fit) -> list[str]:
    """Returns the arguments of ``stronghold train``, without where it writes.

    Gradients are not clipped: updates in the backward pass cannot, and all are to learn the same.
    """
    words: list[object] = ["--method", setting.method, "--layers", setting.layers, "--batch", setting.batch]
    words += ["--hidden", course.hidden, "--heads", course.heads, "--vocabulary", course.vocabulary]
    words += ["--seq", course.sequence, "--steps", course.steps, "--lr", course.lr, "--warmup", 0, "--clip", 0]
    words += ["--dtype", course.dtype, "--device", course.device, "--update", setting.update]
    if setting.cap is not None and course.device != "cpu":  # the CPU has no memory of its own to limit
        words += ["--device-limit", setting.cap]
    words += ["--activations", fitted.activations]
    words += ["--micro-batch", fitted.micro_batch] if fitted.micro_batch is not None else []
    if setting.method == STRONGHOLD:
        words += ["--states", course.states]
        if setting.window is not None:
            words += ["--window", setting.window]
        elif setting.cap is not None:
            words += ["--resident", "auto", "--device-memory", max(0, setting.cap - fitted.reserve)]
    if setting.method == "zero-infinity-nvme":
        words += ["--store", "disk"]
    return list(map(str, words))
