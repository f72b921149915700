"""A step of Muon beside one of AdamW on simulated machines: what of the iteration hides.

    python benchmarks/muon_overlap.py [--windows 2 4] [--layers 32] [--steps 3]

The real engine on stronghold.device.throttled, as in benchmarks/overlap.py: layers of 50 M parameters (hidden size
2,048: matrices of 3h by h, h by h, 4h by h and h by 4h), played by small ones of the same proportions. The iteration
takes the device's FLOP/s from the computation, each direction goes up and down by the link, 2 bytes per parameter each
way, and the update waits for it. The host's part moves the bytes that a kernel needs. All matrices are Muon's, or
AdamW's. Prints step times by the simulated clocks, AdamW's as a part of Muon's, and Muon's longest resource, and
appends one JSON line a row to results/muon_overlap.jsonl.
"""

from __future__ import annotations

import argparse
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from overlap import LAYER_PARAMETERS, MACHINES, Machine, timed
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import stronghold
from stronghold.device.events import Event
from stronghold.device.throttled import ThrottledDevice
from stronghold.lab.records.json_lines import append_record, describe_machine

RESULTS = Path(__file__).parent.parent / "results" / "muon_overlap.jsonl"
STEPS = 5
"""Of Newton and Schulz's iteration."""


class Layer(nn.Module):
    """A transformer's matrices, each of which is used."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.qkv = nn.Linear(size, 3 * size, bias=False)
        self.out = nn.Linear(size, size, bias=False)
        self.up = nn.Linear(size, 4 * size, bias=False)
        self.down = nn.Linear(4 * size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.out(torch.tanh(q * k + v))
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, layers: int, size: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(size) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().pow(2).mean()


class Device(ThrottledDevice):
    """Charges the iteration, too: its FLOPs to the computation, its time and its copies to the update that waits."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._beside_s, self._due_s, self._lock = 0.0, 0.0, threading.Lock()
        self._main = threading.current_thread()
        super().__init__(*args, **settings)

    def beside(self, task: Any) -> Event:
        task()
        short, long = sorted(task.__self__.values.shape)
        flops = STEPS * (4 * short * short * long + 2 * short**3) * self.scale**1.5
        carried = 2 * short * long * self.scale
        spent_s = flops / self.speed.flops
        begin_s = max(self.updates._clock_s, self._beside_s)
        self._beside_s = begin_s + carried / self.speed.up + spent_s + carried / self.speed.down
        with self._lock:
            self._due_s += spent_s
            self.busy_s["fetches"] += carried / self.speed.up
            self.busy_s["gradients"] += carried / self.speed.down
        event = Event()
        event.time = self._beside_s
        event.happen()
        return event

    def host_wait(self, event: Event) -> None:
        if threading.current_thread() is self._main:
            self.compute_wait(event)
            return
        event.wait()
        self.updates._clock_s = max(self.updates._clock_s, event.time)

    def computed(self, reads: Sequence[Tensor], parameters: int, *, backward: bool) -> None:
        with self._lock:
            due_s, self._due_s = self._due_s, 0.0
        self._compute(due_s)
        super().computed(reads, parameters, backward=backward)


def run(machine: Machine, *, layers: int, window: int, update: str, muon: bool, steps: int) -> dict[str, Any]:
    """Returns the mean seconds of ``steps`` steps after two that are not counted, and of each resource's work."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model(layers)
    scale = LAYER_PARAMETERS / sum(p.numel() for p in model.layers[0].parameters())
    device = Device(machine.speed, tokens=machine.tokens, scale=scale)
    stronghold.offload(model, window=window, device=device, dtype=machine.dtype)
    kind = stronghold.Muon if muon else stronghold.AdamW
    optimizer = kind(model.parameters(), lr=1e-3, update=update, threads=1)
    x = torch.randn(2, 32).to(machine.dtype)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    outcome = timed(device, step, steps=steps, warm=2)
    optimizer.wait()
    return {"step_s": outcome.step_s, "busy_s": outcome.busy_s}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, nargs="+", default=[2, 4], help="windows to try (default: 2 4)")
    parser.add_argument("--layers", type=int, default=32, help="layers of the model (default: 32)")
    parser.add_argument("--steps", type=int, default=3, help="steps of which the mean counts (default: 3)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="where to append the records")
    options = parser.parse_args(arguments)
    table = Table(title="seconds of a step, by the simulated clocks", title_justify="left")
    for name in ("machine", "update", "window", "AdamW", "Muon", "AdamW ÷ Muon", "Muon's longest"):
        table.add_column(name, justify="right" if name[:5] in ("AdamW", "Muon", "windo") else "left")
    for machine in (machine for machine in MACHINES if machine.dtype == torch.bfloat16):
        for update in ("deferred", "in_backward"):
            for window in options.windows:
                settings = {"layers": options.layers, "window": window, "update": update, "steps": options.steps}
                adamw, muon = (run(machine, muon=muon, **settings) for muon in (False, True))
                longest = max(muon["busy_s"], key=lambda name: muon["busy_s"][name])
                ratio = adamw["step_s"] / muon["step_s"]
                assert math.isfinite(ratio)
                record = {"machine": machine.name, **settings, "adamw": adamw, "muon": muon, "of_adamw": ratio}
                append_record(options.out, {**record, "measured_on": describe_machine()})
                times = [f"{one['step_s']:.3f}" for one in (adamw, muon)]
                most = f"{longest} {muon['busy_s'][longest]:.3f}"
                table.add_row(machine.name, update, str(window), *times, f"{ratio:.3f}", most)
    Console().print(table)


if __name__ == "__main__":
    main()
