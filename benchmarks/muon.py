"""What a step of Muon takes beside one of AdamW, of the plain model and offloaded.

    python benchmarks/muon.py [--layers 4] [--hidden 256] [--samples 4] [--sequence 256] [--rounds 7] [--device cpu]

The reference GPT in fp32: torch.optim.Muon for the matrices and torch.optim.AdamW for the rest on the plain model, the
same by ``stronghold.Muon`` with all layers and with two of them on the device, deferred and in the backward pass, and
``stronghold.AdamW`` for all parameters. Each row takes a whole step in turn, for the machine's speed changes; the first
turn is not counted. Every row of Muon must end with the same loss to 1e-4. Prints a table of medians with quartiles,
and appends one JSON line a row to results/muon.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import stronghold
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.lab.records.json_lines import append_record, describe_machine

RESULTS = Path(__file__).parent.parent / "results" / "muon.jsonl"
PLAIN = "plain PyTorch, Muon"
MUON = {"lr": 1e-3, "weight_decay": 0.1}
ADAMW = {"lr": 1e-3, "weight_decay": 0.01}
Optimizers = list[torch.optim.Optimizer]


def split_up(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns the layers' matrices, and all other parameters."""
    apart = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and id(p) not in apart and "head" not in name]
    own = set(map(id, matrices))
    return matrices, [p for p in model.parameters() if id(p) not in own]


def plain(model: nn.Module, device: str) -> Optimizers:
    model.to(device)
    matrices, rest = split_up(model)
    return [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(rest, fused=True, **ADAMW)]


def ours(model: nn.Module, device: str, *, window: int, muon: bool = True, update: str = "deferred") -> Optimizers:
    stronghold.offload(model, device=device, window=window)
    if not muon:
        return [stronghold.AdamW(model.parameters(), update=update, **ADAMW)]
    matrices, rest = split_up(model)
    groups = [{"params": matrices, **MUON}, {"params": rest, "use_muon": False, **ADAMW}]
    return [stronghold.Muon(groups, update=update)]


def ways(layers: int) -> dict[str, Callable[[nn.Module, str], Optimizers]]:
    return {
        PLAIN: plain,
        "all layers, Muon": lambda model, device: ours(model, device, window=layers),
        "window 2, Muon": lambda model, device: ours(model, device, window=2),
        "window 2, Muon in_backward": lambda model, device: ours(model, device, window=2, update="in_backward"),
        "window 2, AdamW": lambda model, device: ours(model, device, window=2, muon=False),
        "window 2, AdamW in_backward": lambda model, device: ours(
            model, device, window=2, muon=False, update="in_backward"
        ),
    }


def step(model: nn.Module, optimizers: Optimizers, tokens: Tensor) -> float:
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.item())


def settle(optimizers: Optimizers, device: str) -> None:
    """Waits until all updates are complete: one behind ``step()`` is this step's."""
    for optimizer in optimizers:
        if isinstance(optimizer, stronghold.AdamW):
            optimizer.wait()
    if device != "cpu":
        torch.accelerator.synchronize()


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    shape = GPTConfig(layers=options.layers, hidden=options.hidden, heads=4, sequence=options.sequence, vocabulary=1024)
    rows: dict[str, tuple[nn.Module, Optimizers, list[float], list[float]]] = {}
    for name, prepare in ways(options.layers).items():
        torch.manual_seed(0)
        model = GPT(shape)
        rows[name] = model, prepare(model, options.device), [], []
    generator = torch.Generator().manual_seed(1)
    for _ in range(options.rounds + 1):
        tokens = torch.randint(0, 1024, (options.samples, options.sequence), generator=generator).to(options.device)
        for model, optimizers, seconds, losses in rows.values():
            begin = time.perf_counter()
            losses.append(step(model, optimizers, tokens))
            settle(optimizers, options.device)
            seconds.append(time.perf_counter() - begin)
    expected = rows[PLAIN][3]
    for name, (*_, losses) in rows.items():
        if "Muon" in name:
            assert all(abs(a - b) <= 1e-4 * b for a, b in zip(losses, expected, strict=True)), (name, losses, expected)
    _tell(rows, options)


def _tell(rows: dict[str, Any], options: argparse.Namespace) -> None:
    table = Table(title="seconds of a step, and of plain PyTorch's with Muon", title_justify="left")
    for name in ("way", "median", "quartiles", "ratio, round by round"):
        table.add_column(name, justify="left" if name == "way" else "right")
    first = rows[PLAIN][2][1:]
    for name, (_, _, (_, *seconds), losses) in rows.items():
        low, middle, high = statistics.quantiles(seconds, n=4)
        ratio = statistics.median(one / other for one, other in zip(seconds, first, strict=True))
        table.add_row(name, f"{middle:.3f}", f"{low:.3f} to {high:.3f}", f"{ratio:.2f}")
        settings = ("layers", "hidden", "samples", "sequence", "rounds", "device")
        record = {
            "way": name,
            **{setting: getattr(options, setting) for setting in settings},
            "threads": torch.get_num_threads(),
            "seconds": seconds,
            "of_plain": ratio,
            "losses": losses,
            "machine": describe_machine(),
        }
        append_record(options.out, record)
    Console().print(table)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", metavar="NAME", help="where layers compute (default: cpu)")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="(default: 4)")
    parser.add_argument("--hidden", type=int, default=256, metavar="N", help="(default: 256)")
    parser.add_argument("--samples", type=int, default=4, metavar="N", help="of a step (default: 4)")
    parser.add_argument("--sequence", type=int, default=256, metavar="N", help="tokens of each (default: 256)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="steps of each row, 2 or more (default: 7)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="where to append the records")
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error(f"--rounds must be 2 or more, for quartiles (got {options.rounds}); pass 2")
    return options


if __name__ == "__main__":
    main()
