"""How close a step of LoRA over a streamed base comes to its longest single resource, on simulated machines.

    python benchmarks/lora_overlap.py [--samples 1 4 16] [--layers 40 63] [--bases bf16 nf4_nested]

The real engine on stronghold.device.throttled, as in benchmarks/overlap.py: a 4090 with 40 layers of width 8,192 (32
billion parameters) and an H200 with 63 of width 16,384 (203 billion), played by layers of width 128 in the same
proportions, and PEFT's adapters of a 128th of the width. The device counts the matrix products that PyTorch carries out
(``torch.utils.flop_counter``), adapters and what is computed again included, and takes no time for all else of a layer,
the dequantisation of a base in four bits included.

Each size of a step is played with a window of two and layers recomputed or kept, as if memory for that were there, and
as ``stronghold.plan`` chooses for the machine's own memory. A row has the step by the simulated clocks, and by how much
it is over its longest resource, over the least that a step can take with so many slots (``least_s``), and over what the
planner foretells of it from the real sizes. Appends one JSON line a row to results/lora_overlap.jsonl.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import peft
import torch
from muon_overlap import Model
from overlap import MACHINES, Machine, Outcome, timed
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import stronghold
from stronghold.checkpoint.quantising import quantise
from stronghold.device.throttled import ThrottledDevice
from stronghold.lab.records.json_lines import append_record, describe_machine
from stronghold.planner.machine_file import LINK, UPDATE, MachineFile, Product, Spread
from stronghold.planner.training_plan import TrainingPlan

RESULTS = Path(__file__).parent.parent / "results" / "lora_overlap.jsonl"
BASES = ("bf16", "nf4_nested")
SMALL = 128
"""The width that is played with: adapters have a rank of one there."""
SEQUENCE = 512
"""Tokens of a sample."""
UPDATED_BYTES = 28
"""What AdamW reads and writes of an adapter's element, in fp32."""
ENDLESS = 2**50
GIVEN: tuple[dict[str, Any], ...] = (
    *({"window": 2, "resident": 0, "activations": kind, "micro_batch": None} for kind in ("recompute", "keep")),
    {},
)
"""The settings of each size of a step; none for those that are planned."""


@dataclass(frozen=True, kw_only=True)
class Player:
    """A machine with the model that it trains, and its memory in bytes."""

    machine: Machine
    width: int
    layers: int
    device_bytes: int
    host_bytes: int

    @property
    def scale(self) -> float:
        return (self.width / SMALL) ** 2


PLAYERS = (
    Player(machine=MACHINES[1], width=8192, layers=40, device_bytes=24 * 2**30, host_bytes=256 * 2**30),
    Player(machine=MACHINES[2], width=16384, layers=63, device_bytes=141 * 10**9, host_bytes=2**40),
)


class Products(TorchDispatchMode):
    """Counts the operations of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        elif func._overloadpacket.__name__ == "gemm_4bit":  # of bitsandbytes, which dequantises within the product
            self.flops += 2 * out.numel() * args[0].shape[-1]
        return out


class Device(ThrottledDevice):
    """Charges a layer's computation by the products that were carried out since the last one's."""

    def __init__(self, player: Player) -> None:
        super().__init__(player.machine.speed, tokens=SEQUENCE, scale=player.scale)
        self.products = Products()
        self.charged: list[tuple[bool, float]] = []
        """Of each computation so far, whether it was in the backward pass, and its seconds."""
        self._seen = 0

    def computed(self, reads: Sequence[Tensor], parameters: int, *, backward: bool) -> None:
        flops, self._seen = self.products.flops - self._seen, self.products.flops
        if flops:
            self.charged.append((backward, flops * self.scale * self.tokens / self.speed.flops))
            self._compute(self.charged[-1][1])


def build(player: Player, base: str, *, width: int) -> nn.Module:
    """Returns the model with its adapters: of the small width with values, of the player's own on the meta device."""
    device = torch.device("meta" if width != SMALL else "cpu")
    with device:
        model = Model(player.layers, width).to(torch.bfloat16)
    if base != "bf16" and device.type == "meta":
        quantise(model, base)
    elif base != "bf16":
        _quantise_values(model, nested=base == "nf4_nested")
    lora = peft.LoraConfig(r=width // SMALL, target_modules=["qkv", "out", "up", "down"])
    with device:
        return peft.get_peft_model(model, lora)  # type: ignore[arg-type]


def _quantise_values(model: Model, *, nested: bool) -> None:
    import bitsandbytes

    for layer in model.layers:
        for name, child in [*layer.named_children()]:
            linear = bitsandbytes.nn.Linear4bit(
                child.in_features, child.out_features, bias=False, compute_dtype=torch.bfloat16
            )
            linear.weight = bitsandbytes.nn.Params4bit(
                child.weight.data, quant_type="nf4", compress_statistics=nested, module=linear
            )
            setattr(layer, name, linear.to("cpu"))


def run(player: Player, base: str, *, samples: int, steps: int, **settings: Any) -> tuple[Outcome, float]:
    """Trains ``steps`` steps after one; returns the median, and the least that it can take by :func:`least_s`."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = Device(player)
    model = build(player, base, width=SMALL)
    stronghold.offload(model, device=device, device_memory=ENDLESS, **settings)
    optimizer = stronghold.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, threads=1)
    x = torch.randn(samples, SMALL).to(torch.bfloat16)

    def step() -> None:
        device.charged.clear()
        with device.products:
            model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    outcome = timed(device, step, steps=steps, warm=1)
    optimizer.wait()
    report = stronghold.report(model)
    streamed = player.layers - settings.get("resident", 0)
    fetch_s = 0.0
    if streamed > report.window:
        fetch_s = outcome.busy_s["fetches"] / (2 * (streamed - report.window))
    passes = [[seconds for back, seconds in device.charged if back == backward] for backward in (False, True)]
    stronghold.close(model)
    return outcome, least_s(passes[0], passes[1], fetch_s, streamed=streamed, window=report.window)


def least_s(
    forward_s: Sequence[float], backward_s: Sequence[float], fetch_s: float, *, streamed: int, window: int
) -> float:
    """Returns a lower bound of a step of layers that do not change, whatever the order of their fetches.

    In each pass all ``streamed`` layers but ``window`` are fetched, while the link waits for the computation of the
    pass's first layer, whose slot the first fetch needs, and the computation of its last layer waits for the last one.
    What one pass leaves idle the other cannot use, for there is no slot for it. A window of one fetches under nothing.
    """
    fetches_s = max(0, streamed - window) * fetch_s
    if window == 1 and fetches_s:
        return sum(forward_s) + sum(backward_s) + 2 * fetches_s
    ends_s = 1.0 if fetches_s else 0.0
    return sum(max(sum(each), fetches_s + ends_s * (each[0] + each[-1])) for each in (forward_s, backward_s))


def exactly(value: float) -> Spread:
    return Spread(value, value, value)


def file_of(player: Player, *, device_bytes: int) -> MachineFile:
    """Returns the machine as the planner reads it: its rates are those that the device is played with."""
    speed, at_once = player.machine.speed, exactly(1e30)
    update_ns = {rate: exactly(UPDATED_BYTES / getattr(speed, rate) * 1e9) for rate in ("host", "device")}
    link = {way: exactly(speed.down if way.startswith("d2h") else speed.up) for way in LINK}
    kinds = ("float32", "bfloat16")
    moved = dict.fromkeys(kinds, at_once)
    return MachineFile(
        device="cuda",
        device_name=player.machine.name,
        is_host=False,
        runs_behind=False,
        device_memory_bytes=device_bytes,
        host_memory_bytes=player.host_bytes if device_bytes < ENDLESS else ENDLESS,
        cores=16,
        processor="simulated",
        time="",
        versions={},
        link={**link, "copy_s": exactly(0)},
        matmul=[Product(kind, (SMALL, SMALL, SMALL), exactly(speed.flops)) for kind in kinds],
        attention=[],
        elementwise=moved,
        elementwise_cached=moved,
        transcendental=moved,
        cache_bytes=0,
        op_s=exactly(0),
        launch_s=exactly(0),
        host_update_ns={f"{kind}+fp32": dict.fromkeys(UPDATE, update_ns["host"]) for kind in kinds},
        compute_beside_update=exactly(1),
        device_update_ns={f"{kind}+fp32": update_ns["device"] for kind in kinds},
    )


@cache
def _real(player: Player, base: str) -> nn.Module:
    return build(player, base, width=player.width)


def planned(player: Player, base: str, *, samples: int, **settings: Any) -> TrainingPlan:
    """Returns the plan of the real sizes: of ``settings`` with endless memory, without them of the machine's own."""
    inputs = torch.empty(samples, SEQUENCE, player.width, dtype=torch.bfloat16, device="meta")
    machine = file_of(player, device_bytes=ENDLESS if settings else player.device_bytes)
    return stronghold.plan(_real(player, base), machine=machine, inputs=(inputs,), **settings)


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    table = Table(title="a step of LoRA by the simulated clocks", title_justify="left")
    for name in ("machine", "base", "samples", "settings", "compute", "link", "step"):
        table.add_column(name, justify="left" if name in ("machine", "base", "settings") else "right")
    for name in ("over the longest", "over the least", "over the plan's"):
        table.add_column(name, justify="right")
    layers = options.layers or [player.layers for player in PLAYERS]
    for player in (replace(player, layers=count) for player, count in zip(PLAYERS, layers, strict=True)):
        for base in options.bases:
            for samples in options.samples:
                for settings in GIVEN:
                    found = measure(player, base, samples=samples, steps=options.steps, **settings)
                    append_record(options.out, {**found, "measured_on": describe_machine()})
                    busy_s, overs = found["busy_s"], ("over_longest", "over_least", "over_planned")
                    seconds = (busy_s["compute"], busy_s["fetches"], found["step_s"])
                    told = ("planned: " if not settings else "") + _told(found["settings"])
                    cells = [f"{one:.2f}" for one in seconds] + [f"{100 * found[over]:+.1f} %" for over in overs]
                    table.add_row(player.machine.name, base, str(samples), told, *cells)
    Console(width=160).print(table)


def measure(player: Player, base: str, *, samples: int, steps: int, **settings: Any) -> dict[str, Any]:
    """Returns a row's record; without ``settings`` of those that are planned for the machine's own memory.

    What a step takes is planned and played with the adapters updated on the device, as where there is memory for that.
    """
    chosen = settings or _chosen(planned(player, base, samples=samples))
    plan = planned(player, base, samples=samples, **chosen)
    outcome, least = run(player, base, samples=samples, steps=steps, **chosen)
    return {
        "machine": player.machine.name,
        "width": player.width,
        "layers": player.layers,
        "base": base,
        "samples": samples,
        "sequence": SEQUENCE,
        "chosen_by_plan": not settings,
        "settings": chosen,
        "step_s": outcome.step_s,
        "busy_s": outcome.busy_s,
        "longest": outcome.longest,
        "over_longest": outcome.ratio - 1,
        "least_s": least,
        "over_least": outcome.step_s / least - 1,
        "planned_s": plan.step_s.likely,
        "over_planned": outcome.step_s / plan.step_s.likely - 1,
    }


def _chosen(plan: TrainingPlan) -> dict[str, Any]:
    return {"micro_batch": None} | {name: one for name, one in plan.settings.items() if name != "device_memory"}


def _told(settings: dict[str, Any]) -> str:
    words = [f"window {settings['window']}", f"activations {settings['activations']}"]
    if settings["resident"]:
        words.append(f"{settings['resident']} resident")
    if (samples := settings.get("micro_batch")) is not None:
        words.append(f"micro-batch {samples}")
    return ", ".join(words)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--samples", type=int, nargs="+", default=[1, 4, 16], help=f"of {SEQUENCE} tokens (default: 1 4 16)"
    )
    parser.add_argument("--layers", type=int, nargs=2, help="of both models (default: 40 63)")
    parser.add_argument("--bases", nargs="+", choices=BASES, default=BASES, help="(default: all)")
    parser.add_argument("--steps", type=int, default=1, help="steps of which the median counts (default: 1)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="where to append the records")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
