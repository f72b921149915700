"""How long the stages of a pipeline wait for one another, where what they compute takes a given time.

    torchrun --nproc-per-node 4 benchmarks/bubble.py [--forward 0.04] [--backward 0.08] [--micro-batches 8] [--steps 7]

The real engine runs layers that sleep: so many processes need no cores of their own. Each process has as many seconds
of them whatever the schedule; interleaved it has them as two stages of half the length, or three of a third. The
bubble is the share of a step in which a process does not sleep: 1 - micro-batches · (forward + backward) / step. Prints
a table beside the ideal, (p - 1) / (v · m + p - 1) for v stages on each of p processes and m micro-batches, and appends
one JSON line a schedule to results/bubble.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import stronghold
from stronghold.lab.records.json_lines import append_record, describe_machine

RESULTS = Path(__file__).parent.parent / "results" / "bubble.jsonl"


class Sleep(torch.autograd.Function):
    """Passes its input on after a time, and the gradient after another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Sleeping(nn.Module):
    """A small layer that takes as long as a large one."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.times = forward_s, backward_s
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if y.is_meta else Sleep.apply(y, *self.times)


def main() -> None:
    options = _options()
    dist.init_process_group("gloo")
    processes = dist.get_world_size()
    table = Table(title="bubble", title_justify="left")
    for name in ("schedule", "stages each", "step", "bubble", "least", "most", "ideal"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for schedule, each in (("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 3)):
        bubbles, steps = measure(schedule, each, processes, options)
        if dist.get_rank():
            continue
        m, p = options.micro_batches, processes
        ideal = (p - 1) / (each * m + p - 1)
        low, median, high = min(bubbles), statistics.median(bubbles), max(bubbles)
        step_s = statistics.median(steps)
        bubble = (f"{x:.3f}" for x in (median, low, high, ideal))
        table.add_row(schedule, str(each), f"{step_s * 1e3:.0f} ms", *bubble)
        record = {
            "schedule": schedule,
            "processes": p,
            "stages_per_process": each,
            "micro_batches": m,
            "forward_s": options.forward,
            "backward_s": options.backward,
            "step_s": steps,
            "bubble": bubbles,
            "ideal": ideal,
            "machine": describe_machine(()),
        }
        append_record(RESULTS, record)
    if not dist.get_rank():
        Console().print(table)
    dist.destroy_process_group()


def measure(schedule: str, each: int, processes: int, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Returns the bubble and the seconds of each step, the first left out."""
    stages = each * processes
    model = nn.Sequential(*(Sleeping(options.forward / each, options.backward / each) for _ in range(stages)))
    staged = stronghold.pipeline(
        model,
        loss=nn.functional.mse_loss,
        stages=stages,
        micro_batches=options.micro_batches,
        balance=[1] * stages,
        schedule=schedule,
        device="cpu",
        activations="keep",  # recomputed layers would sleep again in the backward pass
    )
    optimizer = stronghold.AdamW(staged.parameters())
    inputs, targets = torch.randn(options.micro_batches, 8), torch.zeros(options.micro_batches, 8)
    busy_s = options.micro_batches * (options.forward + options.backward)
    steps = []
    for _ in range(options.steps + 1):
        dist.barrier()
        begin = time.perf_counter()
        staged.forward_backward(inputs, targets)
        steps.append(time.perf_counter() - begin)
        optimizer.step()
        optimizer.zero_grad()
    del steps[0]
    return [1 - busy_s / step for step in steps], steps


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forward", type=float, default=0.04, metavar="S", help="seconds of a stage (default: 0.04)")
    parser.add_argument("--backward", type=float, default=0.08, metavar="S", help="the same (default: 0.08)")
    parser.add_argument("--micro-batches", type=int, default=8, metavar="N", help="(default: 8)")
    parser.add_argument("--steps", type=int, default=7, metavar="N", help="steps measured (default: 7)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
