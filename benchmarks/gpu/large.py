"""Models larger than the device's cap: a Llama of 8 B parameters, then the GPT of 5.1 B, in full.

    python benchmarks/gpu/large.py [--cap 24GiB] [--batches 16 8 32] [--window 3] [--only llama-8b]

Each is built from its configuration, without a download and without ever being whole in memory, and trained with bf16
compute, exact fp32 masters, 8-bit moments and updates in the backward pass, under a cap of device memory. Tokens per
second, waits, memory, and the share of the device's best matrix product, as probe.py has measured it on this machine:
"model" counts 6·N FLOPs a token and attention, "done" what is computed, with each layer's forward pass once more. The
losses of each call must be finite, and the last below the first. Appends a JSON line for each batch to large.jsonl.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from half_hour import Recorded, add_options, budget_of, draw, end_of, error_of, say, within
from large_models import MODELS, SMALL_MODELS, Large, flops_of, tile_initialiser
from loops import Loop, batches_of, held_bytes, offloaded, peak_bytes, reset_peak
from probe_parts import synchronize
from probe_table import best_product
from rich import box
from rich.table import Table

import stronghold
from stronghold.device import limit_memory
from stronghold.lab.records.json_lines import Record
from stronghold.units import format_bytes, format_count, format_seconds, parse_bytes

WARM_UP = 2
LR = 1e-5
GOAL = 0.9


def build(large: Large, options: argparse.Namespace) -> Loop:
    """Returns ``large`` in training, its values given layer by layer."""
    with torch.device("meta"):
        model = large.build()
    settings = {"window": min(options.window, large.layers), "weights": tile_initialiser(model)}
    settings["micro_batch"] = options.micro_batch
    if options.compile:
        settings["compile"] = True
    updates = {"update": "in_backward", "states": "8bit"}
    return offloaded(model, dtype="bf16", device=options.device, lr=LR, settings=settings, optimizer=updates)


def measure(
    loop: Loop, large: Large, batch: int, options: argparse.Namespace, left: Callable[[], float]
) -> dict[str, Any]:
    """Returns what steps of ``batch`` samples come to: as many as ``options`` say, fewer where the time ends."""
    device, sequence = options.device, large.sequence
    batches = [next(batches_of(batch, sequence, large.vocabulary, device))]  # one, to see it learnt
    reset_peak(device)
    losses, seconds, waits = [], [], []
    for number in range(WARM_UP + options.steps):
        synchronize(device)
        begin_s = time.perf_counter()
        losses.append(loop.step(*batches).item())
        synchronize(device)
        seconds.append(time.perf_counter() - begin_s)
        report = loop.report()
        assert report is not None and report.step is not None
        waits.append({"fetch": report.step.fetch_wait_s, "update": report.step.update_wait_s})
        if number >= WARM_UP and left() < 2 * seconds[-1]:
            break
    counted = seconds[WARM_UP:]
    forward, head = flops_of(large, batch)
    rates = {"model": 3 * (forward + head), "done": 4 * forward + 3 * head}
    return {
        "parameters": report.parameters,
        "loss_chunk": large.loss_chunk,
        "step_s": counted,
        "tokens_per_s": batch * sequence / median(counted),
        "tflops": {name: flops / median(counted) / 1e12 for name, flops in rates.items()},
        "waits_s": {name: median(one[name] for one in waits[WARM_UP:]) for name in ("fetch", "update")},
        "losses": losses,
        "learned": all(loss == loss and abs(loss) < float("inf") for loss in losses) and losses[-1] < losses[0],
        "peak_bytes": peak_bytes(device),
        "held_bytes": held_bytes(device),
        "report_bytes": report.device_bytes,
        "host_bytes": report.host_bytes,
    }


def table(records: Sequence[Record], best: float | None, cap: int) -> Table:
    """Returns a line for each model and batch; ``best`` are the TFLOP/s of the device's best product."""
    beside = f"best product {best:.4g} TFLOP/s" if best else "no product is measured: run probe.py first"
    drawn = Table(title=f"in full, bf16, 8-bit moments, in_backward, cap {format_bytes(cap)}; {beside}", box=box.SIMPLE)
    columns = ("", "batch", "tokens/s", "a step", "model TFLOP/s", "done", "share", "fetch wait", "update wait")
    for column in (*columns, "device", "peak", "host", "loss", ""):
        drawn.add_column(column, justify="right" if column else "left", no_wrap=True)
    for record in records:
        call = record["call"]
        rates, waits, losses = record["tflops"], record["waits_s"], record["losses"]
        drawn.add_row(
            f"{call['model']}, {format_count(record['parameters'])}",
            f"{call['batch']} x {call['sequence']}",
            f"{record['tokens_per_s']:,.0f}",
            format_seconds(median(record["step_s"])),
            f"{rates['model']:.4g}",
            f"{rates['done']:.4g}",
            f"{rates['done'] / best:.3f}" if best else "",
            format_seconds(waits["fetch"]),
            format_seconds(waits["update"]),
            format_bytes(record["held_bytes"]),
            format_bytes(record["peak_bytes"]),
            format_bytes(record["host_bytes"]),
            f"{float(losses[0]):.3f} to {float(losses[-1]):.3f}",
            "" if record["learned"] else "WRONG",
        )
    return drawn


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    recorded, budget = Recorded("large", options), budget_of(options)
    models = SMALL_MODELS if options.small else MODELS
    chosen = [large for large in models if not options.only or large.name in options.only]
    if options.device.type == "cuda":
        limit_memory(options.device, options.cap)
    calls = [_call(large, batch, options) for large in chosen for batch in options.batches]
    with within(budget):
        for large in chosen:
            left = [b for b in options.batches if recorded.find(_call(large, b, options)) is None]
            if not left or not budget.allows():
                continue
            begin_s = time.perf_counter()
            loop = None
            try:
                loop = build(large, options)
                say(f"{large.name} is in memory after {format_seconds(time.perf_counter() - begin_s)}")
                for batch in left:
                    if not budget.allows():
                        break
                    before_s = budget.left_s
                    try:
                        outcome = measure(loop, large, batch, options, lambda: budget.left_s)
                    except torch.OutOfMemoryError as error:
                        outcome = {"error": error_of(error)}
                    recorded.add(_call(large, batch, options), outcome)
                    budget.took(before_s - budget.left_s)
                    if "error" in outcome:
                        break  # an interrupted backward pass: a smaller batch is for the next call
            except (ImportError, RuntimeError, ValueError, MemoryError, stronghold.errors.StrongholdError) as error:
                recorded.add(_call(large, left[0], options), {"error": error_of(error)})
            finally:
                if loop is not None:
                    loop.close()
    found = [record for call in calls if (record := recorded.find(call))]
    best = best_product(Recorded("probe", options).records)
    whole = [record for record in found if "error" not in record]
    if whole:
        draw(table(whole, best, options.cap))
    for record in found:
        if "error" in record:
            say(f"failed: {record['call']['model']}, batch {record['call']['batch']}: {record['error']}")
    if whole and best:
        say(f"goal: {GOAL} of the best product by what is done, and a peak below the cap")
    return end_of(recorded.left(calls), calls, wrong=not all(record.get("learned", False) for record in found))


def _call(large: Large, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    place = {name: getattr(options, name) for name in ("cap", "window", "micro_batch", "steps", "compile")}
    return {"model": large.name, "batch": batch, "sequence": large.sequence, **place}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    add = parser.add_argument
    names = [large.name for large in (*MODELS, *SMALL_MODELS)]
    add("--cap", type=parse_bytes, default=24 * 2**30, metavar="SIZE", help="of device memory (24GiB)")
    add("--batches", type=int, nargs="+", metavar="N", help="samples of a step (16 8 32)")
    add("--window", type=int, default=3, metavar="N", help="layers on the device at a time (3)")
    add("--micro-batch", type=int, default=16, metavar="N", help="samples a layer computes at a time (16)")
    add("--steps", type=int, default=6, metavar="N", help="that are counted, of each batch (6)")
    add("--compile", action="store_true", help="with layers compiled")
    add("--only", nargs="+", choices=names, metavar="MODEL", help=f"of {', '.join(names)}")
    options = parser.parse_args(arguments)
    options.small = options.small or options.device.type == "cpu"
    options.batches = options.batches or ([2, 4] if options.small else [16, 8, 32])
    return options


if __name__ == "__main__":
    sys.exit(main())
