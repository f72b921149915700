"""Where a step's time goes on a CPU: matrix products, other operations of PyTorch, and what is in neither.

    python benchmarks/step_profile.py [--layers 14] [--hidden 512] [--dtype fp32] [--method NAME]...

The model, batch and precision of benchmarks/methods.py, by torch.profiler over some steps of each method, one method
after the other in one process. "products" are matrix products and attention; "update" is the optimizer's step() and
clearing, where AdamW of the ordinary loop is and where stronghold's deferred one is not; "outside" is what a step takes
beyond all of PyTorch's operations: Python, the engine, and waiting, for the host's updates for one. Prints a table and
appends one JSON line for each method to results/step_profile.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from stronghold.lab.methods import METHODS, Prepared, find_method
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.lab.records.json_lines import append_record, describe_machine
from stronghold.lab.settings import ModelSettings, OptimizerSettings, TrainSettings
from stronghold.settings import OffloadSettings

RESULTS = Path(__file__).parent.parent / "results" / "step_profile.jsonl"
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "mkldnn", "_scaled_dot_product")
VOCABULARY = 51200
UPDATE = "stronghold: update"
PARTS = ("products", "other operations", "update", "outside")


def prepare(name: str, options: argparse.Namespace, folder: str) -> Prepared:
    """Returns the reference GPT, from the same seed for each method, ready to train without clipping."""
    model = ModelSettings(layers=options.layers, hidden=options.hidden, vocabulary=VOCABULARY)
    settings = TrainSettings(
        method=name,
        model=model,
        optimizer=OptimizerSettings(lr=1e-4, max_grad_norm=None),
        offload=OffloadSettings(window="auto"),
        dtype=options.dtype,
        batch=options.batch,
        sequence=options.seq,
        out=folder,
    )
    torch.manual_seed(0)
    config = GPTConfig(
        layers=options.layers,
        hidden=options.hidden,
        heads=model.heads,
        sequence=options.seq,
        vocabulary=VOCABULARY,
    )
    return find_method(name).prepare(GPT(config), settings)


def step(prepared: Prepared, batch: Tensor) -> float:
    """Takes one step; returns its loss."""
    loss = prepared.loss(batch)
    prepared.backward(loss)
    with record_function(UPDATE):
        prepared.step()
    return loss.item()


def measure(prepared: Prepared, batch: Tensor, steps: int) -> dict[str, Any]:
    """Returns the seconds of each step, of a step's parts in the mean, and of its ten longest operations."""
    for _ in range(2):
        step(prepared, batch)
    seconds = []
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(steps):
            begin = time.perf_counter()
            step(prepared, batch)
            seconds.append(time.perf_counter() - begin)
    operations = {event.key: event for event in profiled.key_averages()}
    update = operations.pop(UPDATE).cpu_time_total / 1e6
    own = {k.removeprefix("aten::"): e.self_cpu_time_total / 1e6 for k, e in operations.items() if "aten::" in k}
    products = sum(time_s for name, time_s in own.items() if name.startswith(PRODUCTS))
    in_update = sum(time_s for name, time_s in own.items() if "adam" in name)
    parts = {
        "products": products,
        "update": update,
        "other operations": sum(own.values()) - products - in_update,
        "outside": sum(seconds) - sum(own.values()) - (update - in_update),
    }
    longest = sorted(own.items(), key=lambda item: -item[1])[:10]
    return {
        "step_s": seconds,
        "parts_s": {name: time_s / steps for name, time_s in parts.items()},
        "longest_s": {name: time_s / steps for name, time_s in longest},
    }


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    batch = torch.randint(VOCABULARY, (options.batch, options.seq), generator=torch.Generator().manual_seed(0))
    table = Table(title=f"a step's milliseconds, {options.dtype}", title_justify="left")
    for column in ("method", "step", *PARTS):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name in options.method or ["megatron-lm", "stronghold"]:
        with tempfile.TemporaryDirectory() as folder:
            prepared = prepare(name, options, folder)
            found = measure(prepared, batch, options.steps)
            packages = prepared.packages
            del prepared
        shown = [statistics.median(found["step_s"]), *(found["parts_s"][part] for part in PARTS)]
        table.add_row(name, *(f"{seconds * 1e3:.0f}" for seconds in shown))
        settings = {key: value for key, value in vars(options).items() if key not in ("out", "method")}
        record = {"benchmark": "step_profile", "method": name, "settings": settings, **found}
        append_record(options.out, {**record, "machine": describe_machine(packages)})
    Console().print(table)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=14, metavar="N", help="(default: 14)")
    parser.add_argument("--hidden", type=int, default=512, metavar="N", help="(default: 512)")
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="(default: 4)")
    parser.add_argument("--seq", type=int, default=128, metavar="N", help="(default: 128)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="(default: fp32)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="steps profiled (default: 10)")
    parser.add_argument("--method", action="append", choices=tuple(METHODS), help="repeatable (default: two of them)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="where to append the records")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
