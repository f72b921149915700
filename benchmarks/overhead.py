"""What the engine adds to a layer's passes on the thread that launches them.

    python benchmarks/overhead.py [--device cuda] [--layers 8] [--rounds 5] [--steps 20]

On a GPU this thread must stay ahead of the kernels: what it takes for a layer is the least that a layer takes. The
layers are so small that their own computation is next to nothing, encoder layers of torch.nn with 12 parameters each:
as they are, with the engine where all are resident, streamed through a window of three and keeping what autograd saves,
and streamed and recomputed. Times are the thread's own on a processor, for a layer, the least of all steps: another
thread's turn with Python's lock is not in them. What a small operator takes that the processor computes, through
autograd, is measured beside them: in that unit the planner knows what the engine adds. Prints a table and appends one
JSON line a row to results/overhead.jsonl.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import stronghold
from stronghold.lab.records.json_lines import append_record, describe_machine
from stronghold.probing.call_speed import CHAIN_CALLS, chain

RESULTS = Path(__file__).parent.parent / "results" / "overhead.jsonl"
PASSES = ("forward", "backward", "step")


def settings_of(layers: int) -> dict[str, dict[str, Any] | None]:
    """Returns what ``stronghold.offload`` is called with in each row; None for the model as it is."""
    return {
        "plain PyTorch": None,
        "resident, kept": {"resident": layers, "activations": "keep"},
        "streamed, kept": {"window": min(3, layers), "activations": "keep"},
        "streamed, recomputed": {"window": min(3, layers)},
    }


def build(layers: int, settings: dict[str, Any] | None, device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a model and its AdamW."""
    model: nn.Module = nn.Sequential(
        *(nn.TransformerEncoderLayer(16, 2, 32, dropout=0, batch_first=True, norm_first=True) for _ in range(layers))
    )
    if settings is None:
        model.to(device)
        return model, torch.optim.AdamW(model.parameters())
    model = stronghold.offload(model, device=device, **settings)
    return model, stronghold.AdamW(model.parameters())


def measure(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, backwards: int, device: str = "cpu"
) -> list[float]:
    """Returns the least seconds of the thread in a forward pass, a backward pass and a step with zero_grad().

    On an accelerator each begins when the device has nothing to do, so that none waits for its queue. Autograd has a
    thread of its own for it, whose time from the first gradient to the last counts as well.
    """
    least = [float("inf")] * len(PASSES)
    x = torch.randn(1, 4, 16).to(device).requires_grad_()
    between: list[float] = []
    hook = x.register_hook(lambda gradient: between.append(time.thread_time()))

    def timed(number: int, begin: float, elsewhere: float = 0.0) -> float:
        now = time.thread_time()
        least[number] = min(least[number], now - begin + elsewhere)
        if device != "cpu":
            torch.accelerator.synchronize()
        return time.thread_time()

    for _ in range(steps):
        for _ in range(backwards):
            begin = time.thread_time()
            loss = model(x).sum()
            begin = timed(0, begin)
            if device != "cpu":
                loss.register_hook(lambda gradient: between.append(time.thread_time()))
            loss.backward()
            timed(1, begin, between[1] - between[0] if len(between) == 2 else 0.0)
            between.clear()
        begin = time.thread_time()
        optimizer.step()
        optimizer.zero_grad()
        timed(2, begin)
    hook.remove()
    return least


def measure_call(task: Callable[[], object], steps: int) -> float:
    """Returns the least seconds of the thread for one small operator of ``task``, a chain of them."""
    least = float("inf")
    for _ in range(steps):
        begin = time.thread_time()
        task()
        least = min(least, time.thread_time() - begin)
    return least / CHAIN_CALLS


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    torch.set_num_threads(1)
    rows = {
        (name, backwards): (*build(options.layers, settings, options.device), [float("inf")] * len(PASSES))
        for backwards in (1, 2)
        for name, settings in settings_of(options.layers).items()
    }
    calls, call_s = chain(torch.device("cpu")), float("inf")
    for _ in range(options.rounds):  # in turn, for the machine's speed changes
        call_s = min(call_s, measure_call(calls, options.steps))
        for (_, backwards), (model, optimizer, least) in rows.items():
            least[:] = map(min, least, measure(model, optimizer, options.steps, backwards, options.device))
    table = Table(title="microseconds of the launching thread, for a layer", title_justify="left")
    for name in ("layers", "backward passes a step", *PASSES):
        table.add_column(name, justify="left" if name == "layers" else "right")
    for (name, backwards), (_, _, least) in rows.items():
        each = {which: seconds / options.layers for which, seconds in zip(PASSES, least, strict=True)}
        table.add_row(name, str(backwards), *(f"{seconds * 1e6:.0f}" for seconds in each.values()))
        record = {
            "way": name,
            "backwards": backwards,
            "layers": options.layers,
            "device": options.device,
            "seconds_a_layer": each,
            "call_s": call_s,
            "machine": describe_machine(),
        }
        append_record(options.out, record)
    Console().print(table)
    Console().print(f"a small operator on the host: {call_s * 1e6:.2f} microseconds")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", metavar="NAME", help="where layers compute (default: cpu)")
    parser.add_argument("--layers", type=int, default=8, metavar="N", help="(default: 8)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each row (default: 5)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps of a turn (default: 20)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="where to append the records")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
