"""How close a step comes to its longest single resource, on devices of given speed.

    python benchmarks/overlap.py [--windows 1 2 4 8] [--layers 32] [--steps 3] [--clock-only]

Two tables: the machines as they are, over windows; and each with a host so slow that its updates take nine tenths of
the pass that they hide under (the backward pass under in_backward, the next forward pass when deferred), without and
with the first layer resident.

Runs the real engine (streams, events, schedule, optimizer) on stronghold.device.throttled: layers of 50 M parameters,
as in the 1.7 B model, played by small ones. Prints the step time beside the longest of compute, link up, link down and
host update, and appends one JSON line per row to results/overlap.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import stronghold
from stronghold.device.throttled import Speed, ThrottledDevice
from stronghold.lab.records.json_lines import append_record, describe_machine

LAYER_PARAMETERS = 50_358_272  # 12·h² + 13·h at h = 2048
RESULTS = Path(__file__).parent.parent / "results" / "overlap.jsonl"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine to play: what it sustains, the bytes of a weight in its compute type, and the tokens of a step."""

    name: str
    speed: Speed
    dtype: torch.dtype
    tokens: int


MACHINES = (
    Machine(
        name="V100, PCIe 3, fp32",
        speed=Speed(flops=14e12, up=12e9, down=12e9, host=60e9, device=0.8e12),
        dtype=torch.float32,
        tokens=4 * 1024,
    ),
    Machine(
        name="RTX 4090, PCIe 4, bf16",
        speed=Speed(flops=150e12, up=25e9, down=25e9, host=60e9, device=0.9e12),
        dtype=torch.bfloat16,
        tokens=48 * 1024,
    ),
    Machine(
        name="H200, PCIe 5, bf16",
        speed=Speed(flops=600e12, up=55e9, down=55e9, host=300e9, device=4e12),
        dtype=torch.bfloat16,
        tokens=64 * 1024,
    ),
)


class _Layer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class _Model(nn.Module):
    def __init__(self, layers: int, size: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(size) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().pow(2).mean()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Seconds of a step: by the clocks, by the wall (0 where it was not paced), and of each resource's work."""

    step_s: float
    wall_s: float
    busy_s: dict[str, float]

    @property
    def longest(self) -> str:
        return max(self.busy_s, key=lambda name: self.busy_s[name])

    @property
    def ratio(self) -> float:
        return (self.wall_s or self.step_s) / self.busy_s[self.longest]


def with_slow_host(machine: Machine, update: str, share: float = 0.9) -> Machine:
    """Returns the machine with a host whose updates take ``share`` of the pass that they hide under."""
    forward_s = 2 * LAYER_PARAMETERS * machine.tokens / machine.speed.flops
    pass_s = 3 * forward_s if update == "in_backward" else forward_s
    moved_bytes = 28 if machine.dtype == torch.float32 else 26
    return replace(machine, speed=replace(machine.speed, host=moved_bytes * LAYER_PARAMETERS / (share * pass_s)))


def run(
    machine: Machine, *, layers: int, window: int, update: str, steps: int, paced: bool, resident: int = 0
) -> Outcome:
    """Trains ``steps`` steps after one that is not counted, and returns what one of them takes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = _Model(layers)
    scale = LAYER_PARAMETERS / sum(p.numel() for p in model.layers[0].parameters())
    device = ThrottledDevice(machine.speed, tokens=machine.tokens, scale=scale, paced=paced)
    stronghold.offload(model, window=window, device=device, dtype=machine.dtype, resident=resident)
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-3, update=update, threads=1)
    x = torch.randn(2, 64).to(machine.dtype)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    outcome = timed(device, step, steps=steps, warm=1)
    optimizer.wait()
    return outcome


def timed(device: ThrottledDevice, step: Callable[[], None], *, steps: int, warm: int) -> Outcome:
    """Returns what a step takes of ``steps`` after ``warm`` that are not counted, by the clocks and by the wall.

    That is the mean by the clocks, for of what goes on beside a step one may have more and the next one less, and the
    median by the wall.
    """
    clocks, walls, works = [], [], []
    for _ in range(warm + steps):
        device.clock_s = device.paced_until(device.clock_s)  # both clocks begin the step at one time
        begin_s, wall_s, before = device.clock_s, time.perf_counter(), dict(device.busy_s)
        step()
        clocks.append(device.clock_s - begin_s)
        walls.append(time.perf_counter() - wall_s)
        works.append({name: device.busy_s[name] - before[name] for name in before})
    return Outcome(
        step_s=statistics.fmean(clocks[warm:]),
        wall_s=statistics.median(walls[warm:]) if device.paced else 0.0,
        busy_s={name: statistics.fmean(work[name] for work in works[warm:]) for name in works[0]},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--windows", type=int, nargs="+", default=[1, 2, 4, 8], help="windows to try (default: 1 2 4 8)"
    )
    parser.add_argument("--layers", type=int, default=32, help="layers of the model (default: 32)")
    parser.add_argument("--steps", type=int, default=3, help="steps that count (default: 3)")
    parser.add_argument("--clock-only", action="store_true", help="do not sleep; trust the simulated clocks")
    arguments = parser.parse_args()
    console = Console(width=150)
    console.print(
        _measure(
            f"{arguments.layers} layers of 50 M parameters, seconds per step",
            [
                (machine, update, window, 0)
                for machine in MACHINES
                for update in ("deferred", "in_backward")
                for window in arguments.windows
            ],
            arguments,
        )
    )
    console.print(
        _measure(
            "the same, host updates at 0.9 of the pass that they hide under",
            [
                (with_slow_host(machine, update), update, 2, resident)
                for machine in MACHINES
                for update in ("deferred", "in_backward")
                for resident in (0, 1)
            ],
            arguments,
        )
    )


def _measure(title: str, rows: list[tuple[Machine, str, int, int]], arguments: argparse.Namespace) -> Table:
    table = Table(title=title)
    for column in (
        "machine",
        "update",
        "w",
        "resident",
        "compute",
        "up",
        "down",
        "host",
        "clock",
        "wall",
        "over the longest",
    ):
        table.add_column(column, justify="left" if column in ("machine", "update") else "right")
    for machine, update, window, resident in track(rows, description="playing", transient=True):
        outcome = run(
            machine,
            layers=arguments.layers,
            window=window,
            update=update,
            steps=arguments.steps,
            paced=not arguments.clock_only,
            resident=resident,
        )
        busy = outcome.busy_s
        table.add_row(
            machine.name,
            update,
            str(window),
            str(resident),
            *(f"{busy[name]:.3f}" for name in ("compute", "fetches", "gradients", "updates")),
            f"{outcome.step_s:.3f}",
            f"{outcome.wall_s:.3f}" if outcome.wall_s else "-",
            f"{(outcome.ratio - 1) * 100:+.1f} % ({outcome.longest})",
        )
        append_record(
            RESULTS,
            {
                "benchmark": "overlap",
                "machine": machine.name,
                "update": update,
                "window": window,
                "resident": resident,
                "layers": arguments.layers,
                "tokens": machine.tokens,
                "speed": vars(machine.speed),
                "step_s": outcome.step_s,
                "wall_s": outcome.wall_s,
                "busy_s": busy,
                "longest": outcome.longest,
                "over_longest": outcome.ratio - 1,
                **describe_machine(),
            },
        )
    return table


if __name__ == "__main__":
    main()
