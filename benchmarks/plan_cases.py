"""Random machines, models and settings, run by the real engine on a device of given speed, and by the step model."""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from unittest import mock

import torch
from torch import Tensor, nn

import stronghold
from benchmarks.throttled_disk import ThrottledDisk, updates_that_take
from stronghold.device.throttled import Speed, ThrottledDevice
from stronghold.engine.engine import Engine
from stronghold.planner.machine_rates import ADDED_BYTES
from stronghold.planner.step import StepTime, step_time
from stronghold.planner.step_costs import LayerWork, Machine, RootWork, StepSettings
from stronghold.spans import Span
from stronghold.store import disk as disk_store

SIZE = 64
"""Numbers per sample; with layers of SIZE x SIZE weights every tensor is whole pages on disk."""
WARM_UP, STEPS = 2, 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """A machine, a model and settings. ``seconds`` are what a layer of mean size takes on each resource."""

    seed: int
    widths: tuple[int, ...]
    """Of each layer, in multiples of SIZE."""
    root: tuple[bool, ...]
    """Whether there is a root parameter before the layers, and one behind them."""
    window: int
    resident: int
    update: str
    activations: str
    micro_batch: int | None
    dtype: torch.dtype
    on_disk: bool
    root_on_device: bool
    """Whether root parameters are updated on the device."""
    seconds: dict[str, float] = field(default_factory=dict)
    by_muon: bool = False
    """Whether Muon updates the layers."""
    tokens: int = 1
    """Of a step: the more, the less Muon's iterations take beside the layers."""
    passes: int = 1
    """Of a step, whose gradients are added up."""
    samples: int = 4
    """What layers' inputs have: the more, the longer they take on their way down and up."""


def draw(seed: int, *, layers: int = 16, on_disk: bool = False) -> Case:
    """Returns the case of this number, of 4 to ``layers`` layers.

    A layer computes 5 to 20 ms forward, and links and hosts are faster and slower than that.
    """
    rng = random.Random(seed)

    def seconds(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    layers = rng.randint(4, layers)
    alike = rng.random() < 0.5
    resident = min(rng.choice((0, 0, 0, 1, 2)), layers - 2)
    return Case(
        seed=seed,
        widths=tuple(2 if alike else rng.randint(1, 4) for _ in range(layers)),
        root=(rng.random() < 0.5, rng.random() < 0.5),
        window=min(rng.randint(1, 6), layers - resident),
        resident=resident,
        update=rng.choice(("deferred", "in_backward")),
        activations=rng.choice(("recompute", "keep")),
        micro_batch=rng.choice((None, 1, 2)),
        dtype=rng.choice((torch.float32, torch.bfloat16)),
        on_disk=on_disk,
        seconds={
            "forward": seconds(0.005, 0.020),
            "fetch": seconds(0.005, 0.060),
            "gradients": seconds(0.005, 0.060),
            "update": seconds(0.005, 0.080),
            "update_on_device": seconds(0.001, 0.005),
            "read": seconds(0.002, 0.020),
            "write": seconds(0.002, 0.020),
        },
        root_on_device=rng.random() < 0.4,
    )


def with_inputs_on_host(case: Case) -> Case:
    """Returns the same with layers' inputs on the host, of which one takes a fifth to three times a layer's weights."""
    rng = random.Random(case.seed)
    weights = 2 * SIZE * sum(case.widths) / len(case.widths)
    samples = round(weights * math.exp(rng.uniform(math.log(0.2), math.log(3))))
    return replace(case, activations="host", micro_batch=None, samples=samples)


def with_passes(case: Case, passes: int) -> Case:
    """Returns the same with so many passes in a step, of deferred updates."""
    return replace(case, passes=passes, update="deferred")


def with_inputs_on_disk(case: Case) -> Case:
    """Returns the same with layers' inputs on disk, of a case whose layers are."""
    return replace(with_inputs_on_host(case), activations="disk")


def slower(case: Case, factor: float) -> Case:
    """Returns the same machine at a slower pace: what the machine at hand takes for itself counts for less then."""
    return replace(case, seconds={name: factor * seconds for name, seconds in case.seconds.items()})


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(SIZE, width * SIZE, bias=False)
        self.down = nn.Linear(width * SIZE, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


class _Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE, bias=False) if case.root[0] else nn.Identity()
        self.layers = nn.ModuleList(_Layer(width) for width in case.widths)
        self.last = nn.Linear(SIZE, SIZE, bias=False) if case.root[1] else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.last(x).float().pow(2).mean()
        return y


@dataclass(frozen=True)
class Outcome:
    """Seconds of a step: the model's, and the engine's by its clocks and by the wall (0 where it was not paced)."""

    planned: StepTime
    clock_s: float
    wall_s: float
    spans: list[Span]
    """What the engine has done in the last step, by its clocks."""

    @property
    def error(self) -> float:
        """How much longer the planned step is than the engine's, as a share of that."""
        return self.planned.step_s / (self.wall_s or self.clock_s) - 1


def run(case: Case, *, paced: bool) -> Outcome:
    """Trains on the case's machine and plans the same; ``paced`` for the wall clock, which a disk needs."""
    assert paced or not case.on_disk, "a disk has no clock but the wall's"
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with ExitStack() as stack:
        speed, engine, clocks, walls, spans = stack.enter_context(_trained(case, paced))
        return Outcome(planned(case, engine, speed), statistics.median(clocks), statistics.median(walls), spans)


@contextmanager
def _trained(case: Case, paced: bool) -> Iterator[tuple[Speed, Engine, list[float], list[float], list[Span]]]:
    elements = 2 * SIZE**2 * sum(case.widths) / len(case.widths)
    weight_bytes, seconds = elements * case.dtype.itemsize, case.seconds
    speed = Speed(
        flops=2 * elements * case.tokens / seconds["forward"],
        up=weight_bytes / seconds["fetch"],
        down=weight_bytes / seconds["gradients"],
        host=math.inf if case.on_disk else moved_bytes(case.dtype) * elements / seconds["update"],
        device=moved_bytes(case.dtype) * elements / seconds["update_on_device"],
    )
    device = ThrottledDevice(speed, tokens=case.tokens, paced=paced, keeps=case.activations == "keep")
    with ExitStack() as stack:
        store = "ram"
        if case.on_disk:
            store = stack.enter_context(tempfile.TemporaryDirectory())
            disk = {
                "read_bytes_per_s": weight_bytes / seconds["read"],
                "write_bytes_per_s": weight_bytes / seconds["write"],
            }
            stack.enter_context(mock.patch.object(disk_store, "Disk", lambda threads: ThrottledDisk(**disk)))
            stack.enter_context(updates_that_take(seconds["update"] / elements))
        model = _Model(case)
        stronghold.offload(
            model,
            window=case.window,
            store=store,
            device=device,
            dtype=case.dtype,
            resident=case.resident,
            micro_batch=case.micro_batch,
            activations=case.activations,
            device_memory=2**40 if case.root_on_device else None,
        )
        engine: Engine = model.__dict__["_stronghold"]
        stack.callback(engine.release)
        optimizer = _optimizer(case, model)
        x = torch.randn(case.samples, SIZE).to(case.dtype)
        clocks, walls = [], []

        def step() -> None:
            clock_s, wall_s = device.clock_s, time.perf_counter()
            for _ in range(case.passes):
                model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            clocks.append(device.clock_s - clock_s)
            walls.append(time.perf_counter() - wall_s)

        for _ in range(WARM_UP + STEPS - 1):
            step()
        with stronghold.trace(model) as timeline:
            step()
        optimizer.wait()
        yield speed, engine, clocks[WARM_UP:], walls[WARM_UP:] if paced else [0.0], timeline.spans()


def _optimizer(case: Case, model: nn.Module) -> stronghold.AdamW:
    if not case.by_muon:
        return stronghold.AdamW(model.parameters(), lr=1e-3, update=case.update, threads=1)
    inner = {id(p) for layer in model.get_submodule("layers").modules() for p in layer._parameters.values()}
    root = [p for p in model.parameters() if id(p) not in inner]
    groups: list[dict[str, object]] = [{"params": [p for p in model.parameters() if id(p) in inner]}]
    groups += [{"params": root, "use_muon": False}] if root else []
    return stronghold.Muon(groups, lr=1e-3, update=case.update, threads=1)


def iteration_flops(width: int) -> int:
    """Returns the operations of five iterations of both matrices of a layer: what torch counts of its products."""
    short, long = SIZE, width * SIZE
    return 2 * 5 * 2 * (2 * short * short * long + short**3)


def planned(case: Case, engine: Engine, speed: Speed) -> StepTime:
    """Returns what the step model says of the case, from the units' bytes and the machine's rates alone."""
    itemsize, backward = case.dtype.itemsize, 4 if case.activations == "keep" else 6
    states_bytes = itemsize + (2 if itemsize == 2 else 0) + 8  # weight, remainder and two moments of an element
    low_bytes = 2 if case.passes > 1 and case.dtype == torch.bfloat16 else 0  # an update reads those of sums, too
    updated = moved_bytes(case.dtype) + low_bytes
    update_s = case.seconds["update"] / (2 * SIZE**2 * sum(case.widths) / len(case.widths))
    input_bytes = case.samples * SIZE * itemsize if case.activations in ("host", "disk") else 0
    layers = [
        LayerWork(
            forward_s=2 * unit.elements * case.tokens / speed.flops,
            backward_s=backward * unit.elements * case.tokens / speed.flops,
            weight_bytes=unit.layout.total_bytes,
            gradient_bytes=unit.gradients.layout.total_bytes,
            elements=unit.elements,
            on_disk=case.on_disk and not unit.resident,
            ring_bytes=states_bytes * unit.elements if case.on_disk else 0,
            matrices=2 * case.by_muon,
            iteration_s=iteration_flops(width) / speed.flops if case.by_muon else 0.0,
            input_bytes=input_bytes if number or case.root[0] else 0,  # the model's own inputs have no gradient
            inputs_on_disk=case.activations == "disk",
        )
        for number, (width, unit) in enumerate(zip(case.widths, engine.layers, strict=True))
    ]
    root = [
        RootWork(
            first=unit.name.startswith("first"),
            resident=unit.resident,
            weight_bytes=unit.layout.total_bytes,
            gradient_bytes=(itemsize + low_bytes) * unit.elements,
            elements=unit.elements,
            ring_bytes=(states_bytes - itemsize) * unit.elements if case.on_disk else 0,
        )
        for unit in engine.units
        if unit.is_root
    ]
    weight_bytes = itemsize * 2 * SIZE**2 * sum(case.widths) / len(case.widths)
    machine = Machine(
        h2d_bytes_per_s=speed.up,
        d2h_bytes_per_s=speed.down,
        host_update_ns=updated / moved_bytes(case.dtype) * update_s * 1e9,
        device_update_ns=updated / speed.device * 1e9,
        host_add_ns=ADDED_BYTES[str(case.dtype).removeprefix("torch.")] / speed.host * 1e9,
        runs_behind=False,
        disk_read_bytes_per_s=weight_bytes / case.seconds["read"],
        disk_write_bytes_per_s=weight_bytes / case.seconds["write"],
        slowed={},
    )
    settings = StepSettings(
        window=case.window,
        resident=[layer for layer, unit in enumerate(engine.layers) if unit.resident],
        in_backward=case.update == "in_backward",
        passes=case.passes,
    )
    return step_time(layers, machine, settings, root)


def moved_bytes(dtype: torch.dtype) -> int:
    """Returns what AdamW's update of one element reads and writes: master, gradient, two moments."""
    return 8 + dtype.itemsize + 16
