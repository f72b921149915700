"""Samples per second of the reference GPT through windows of several sizes, beside the same model wholly on the device.

    python benchmarks/gpu.py [--layers 32] [--hidden 2048] [--batch 4] [--windows 2 4 8] [--dtype bf16]
    python benchmarks/gpu.py --windows --caps 8GiB 16GiB 24GiB 32GiB      # resident="auto" under caps of device memory

Under a cap the whole process may take no more device memory than that; ``--reserve`` of it is for activations, and
resident layers and the window fill the rest. Interleaves the settings over ``--rounds`` rounds and prints medians with
their spread, peak device memory beside what ``stronghold.report`` promised, and what the compute stream waited for.
Appends one JSON line per setting to results/gpu.jsonl. ``--device cpu`` runs the same on the CPU, to try it out.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import stronghold
from stronghold.evaluation.records import append_record, describe_machine
from stronghold.models.gpt import GPT, GPTConfig
from stronghold.units import format_bytes, parse_bytes

RESULTS = Path(__file__).parent.parent / "results" / "gpu.jsonl"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to train: through a window of so many layers, under a cap in bytes, or wholly on the device."""

    window: int | None = None
    update: str = "deferred"
    cap: int | None = None

    @property
    def whole(self) -> bool:
        return self.window is None and self.cap is None


def measure(config: GPTConfig, arguments: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    """Trains ``--steps`` steps after two that are not counted."""
    device, dtype = arguments.device, DTYPES[arguments.dtype]
    torch.manual_seed(0)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (setting.cap or total) / total))
    model: torch.nn.Module = GPT(config)
    if setting.whole:
        model = model.to(device=device, dtype=dtype)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    else:
        stronghold.offload(
            model,
            window=setting.window or "auto",
            resident=0 if setting.cap is None else "auto",
            device_memory=None if setting.cap is None else setting.cap - parse_bytes(arguments.reserve),
            device=device,
            dtype=dtype,
            activations=arguments.activations,
            micro_batch=arguments.micro_batch,
        )
        optimizer = stronghold.AdamW(model.parameters(), update=setting.update, states=arguments.states)
    before = None if setting.whole else stronghold.report(model)
    tokens = torch.randint(0, config.vocabulary, (arguments.batch, config.sequence)).to(device)
    times = []
    for _ in range(arguments.steps + 2):
        begin = time.perf_counter()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # a loop that logs its loss waits for the device here
        times.append(time.perf_counter() - begin)
    step = None if setting.whole else stronghold.report(model).step
    return {
        "times_s": times[2:],
        "loss": loss.item(),
        "window": before.window if before else None,
        "resident": before.resident if before else config.layers,
        "promised_device_bytes": before.device_bytes if before else 0,
        "peak_device_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
        "fetch_wait_s": step.fetch_wait_s if step else 0.0,
        "update_wait_s": step.update_wait_s if step else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 32), ("hidden", 2048), ("heads", 16), ("sequence", 1024), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--windows", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--caps", nargs="*", default=[], metavar="SIZE", help="device memory to keep to, such as 8GiB")
    parser.add_argument("--reserve", default="2GiB", metavar="SIZE", help="of a cap, for activations (default: 2GiB)")
    parser.add_argument("--states", choices=("fp32", "8bit"), default="fp32")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--activations", choices=("recompute", "keep", "host"), default="recompute")
    parser.add_argument("--micro-batch", type=int, default=None)
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each setting in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-resident", action="store_true", help="leave out the model wholly on the device")
    arguments = parser.parse_args()
    config = GPTConfig(
        layers=arguments.layers, hidden=arguments.hidden, heads=arguments.heads, sequence=arguments.sequence
    )
    ways = [{"window": window} for window in arguments.windows]
    ways += [{"cap": parse_bytes(cap)} for cap in arguments.caps]
    settings = [Setting(**way, update=update) for way in ways for update in ("deferred", "in_backward")]
    if not arguments.no_resident:
        settings.insert(0, Setting())
    outcomes: dict[Setting, list[dict[str, Any]]] = {setting: [] for setting in settings}
    for _ in range(arguments.rounds):
        for setting in settings:
            outcomes[setting].append(measure(config, arguments, setting))
            gc.collect()
            if arguments.device == "cuda":
                torch.cuda.empty_cache()
    table = Table(title=f"{config.parameters / 1e9:.3f} B parameters, batch {arguments.batch}, {arguments.dtype}")
    for column in (
        "cap",
        "window",
        "resident",
        "update",
        "samples/s",
        "spread",
        "TFLOPS",
        "peak",
        "promised",
        "fetch wait",
        "update wait",
    ):
        table.add_column(column, justify="right")
    for setting, rounds in outcomes.items():
        times = [t for outcome in rounds for t in outcome["times_s"]]
        median = statistics.median(times)
        tokens = arguments.batch * config.sequence
        table.add_row(
            format_bytes(setting.cap) if setting.cap else "-",
            "-" if setting.whole else str(rounds[0]["window"]),
            str(rounds[0]["resident"]),
            setting.update,
            f"{arguments.batch / median:.3f}",
            f"{arguments.batch / max(times):.3f} to {arguments.batch / min(times):.3f}",
            f"{6 * config.parameters * tokens / median / 1e12:.1f}",
            format_bytes(max(outcome["peak_device_bytes"] for outcome in rounds)),
            format_bytes(rounds[0]["promised_device_bytes"]),
            f"{statistics.median(o['fetch_wait_s'] for o in rounds):.3f} s",
            f"{statistics.median(o['update_wait_s'] for o in rounds):.3f} s",
        )
        append_record(
            RESULTS,
            {
                "benchmark": "gpu",
                "window": rounds[0]["window"],
                "resident": rounds[0]["resident"],
                "cap_bytes": setting.cap,
                "update": setting.update,
                "parameters": config.parameters,
                "settings": vars(arguments),
                "samples_per_s": arguments.batch / median,
                "times_s": times,
                "rounds": rounds,
                **describe_machine(),
            },
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
