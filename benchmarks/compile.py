"""Compiled layers beside eager ones, with the engine and without it.

    python benchmarks/compile.py [--device cuda] [--layers 12] [--hidden 512] [--dtype float32] [--rounds 5]

Trains the reference GPT in six ways, a step of each in turn, so that a machine whose speed changes does so for all: the
model as it is and with each layer compiled, with torch's fused AdamW; and offloaded, eager and compiled, with
``window="auto"`` and with a window of two. With ``--activations recompute`` layers are computed again in all of them,
without the engine by torch.utils.checkpoint inside of what is compiled. In bf16 the engine has exact masters, and the
model as it is has none.

The first step, in which graphs are made, is timed apart, and losses are compared with the eager ones. Prints a table of
medians over the rounds, speed as the ratio to the compiled model without the engine in the same round, and appends one
JSON line a row to results/compile.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import checkpoint

import stronghold
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.lab.records.json_lines import append_record, describe_machine

RESULTS = Path(__file__).parent.parent / "results" / "compile.jsonl"
RECORDED = ("layers", "hidden", "dtype", "activations", "batch", "sequence", "device")
BESIDE = "plain, compiled"
WAYS: dict[str, dict[str, Any] | None] = {
    "plain, eager": None,
    BESIDE: None,
    "offloaded, eager": {"window": "auto"},
    "offloaded, compiled": {"window": "auto", "compile": True},
    "window 2, eager": {"window": 2},
    "window 2, compiled": {"window": 2, "compile": True},
}
"""What ``stronghold.offload`` is called with in each row; None for the model as it is."""


class Way:
    """One row: a model with its optimizer, and the seconds and losses of its steps."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        model: nn.Module = GPT(
            GPTConfig(
                layers=options.layers,
                hidden=options.hidden,
                heads=options.hidden // 64 or 1,
                sequence=options.sequence,
                vocabulary=options.vocabulary,
                dropout=0.0,
            )
        )
        dtype, settings = getattr(torch, options.dtype), WAYS[name]
        if settings is None:
            model.to(options.device, dtype)
            for layer in model.layers:
                forward = again(layer.forward) if options.activations == "recompute" else layer.forward
                layer.forward = torch.compile(forward, dynamic=False) if name == BESIDE else forward
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        else:
            if options.backend is not None and "compile" in settings:
                settings = {**settings, "compile": options.backend}
            stronghold.offload(model, device=options.device, dtype=dtype, activations=options.activations, **settings)
            self.optimizer = stronghold.AdamW(model.parameters(), lr=1e-4)
        self.name, self.model, self.device = name, model, options.device
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, tokens: torch.Tensor) -> None:
        begin = time.perf_counter()
        loss = self.model(tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        if self.device != "cpu":
            torch.accelerator.synchronize()
        self.seconds.append(time.perf_counter() - begin)


def again(forward: Any) -> Any:
    """Returns a layer's ``forward`` that is computed again in the backward pass."""
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    ways = [Way(name, options) for name in WAYS if name not in options.leave_out]
    generator = torch.Generator().manual_seed(1)
    for _ in range(options.warm + options.rounds):
        tokens = torch.randint(0, options.vocabulary, (options.batch, options.sequence), generator=generator)
        for way in ways:
            way.step(tokens.to(options.device))
    beside = next(way for way in ways if way.name == BESIDE).seconds[options.warm :]
    eager = next(way for way in ways if way.name == "plain, eager").losses
    table = Table(
        title=f"{options.layers} layers of {options.hidden}, {options.dtype}, {options.activations}",
        title_justify="left",
    )
    for column in ("layers", "first step", "step", "speed", "spread", "loss"):
        table.add_column(column, justify="left" if column == "layers" else "right")
    for way in ways:
        steps = way.seconds[options.warm :]
        ratios = sorted(other / own for other, own in zip(beside, steps, strict=True))
        apart = max(abs(a - b) / abs(b) for a, b in zip(way.losses, eager, strict=True))
        speed = statistics.median(ratios)
        table.add_row(
            way.name,
            f"{way.seconds[0]:.1f} s",
            f"{statistics.median(steps):.3f} s",
            f"{speed:.2f}",
            f"{ratios[0]:.2f}-{ratios[-1]:.2f}",
            f"{apart:.1e}",
        )
        record = {
            "way": way.name,
            **{name: getattr(options, name) for name in RECORDED},
            "first_step_s": way.seconds[0],
            "steps_s": steps,
            "speed": speed,
            "ratios": ratios,
            "loss_apart": apart,
            "machine": describe_machine(),
        }
        if isinstance(WAYS[way.name], dict):
            report = stronghold.report(way.model)
            record |= {"compiled": report.compiled, "not_compiled": report.not_compiled}
        append_record(options.out, record)
    Console().print(table)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", metavar="NAME", help="where layers compute (default: cpu)")
    parser.add_argument("--layers", type=int, default=12, metavar="N", help="(default: 12)")
    parser.add_argument("--hidden", type=int, default=512, metavar="N", help="(default: 512)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="(default: float32)")
    parser.add_argument(
        "--activations",
        default="keep",
        choices=["keep", "recompute"],
        help="what a backward pass finds (default: keep)",
    )
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="(default: 4)")
    parser.add_argument("--sequence", type=int, default=128, metavar="N", help="(default: 128)")
    parser.add_argument("--vocabulary", type=int, default=256, metavar="N", help="(default: 256)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="timed steps of each way (default: 5)")
    parser.add_argument("--warm", type=int, default=2, metavar="N", help="steps before them, 1 or more (default: 2)")
    parser.add_argument(
        "--leave-out",
        action="append",
        default=[],
        choices=[name for name, settings in WAYS.items() if settings is not None],
        metavar="NAME",
        help='a row that is not measured, such as "window 2, eager", where so many models do not fit; repeatable',
    )
    parser.add_argument("--backend", metavar="NAME", help="what the engine compiles with, if not inductor")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="where to append the records")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
