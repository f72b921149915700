"""``python -m tests.fits``: whether plans that are said to fit do, and whether those refused would have.

Random models, trained whole or in part, in one pass a step or several, under random caps of a device's memory: each
plan is run for two steps on the accelerator in software, where the peak of what was allocated is known to the byte, and
so is the least that was refused where nothing was said to fit.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stronghold
from stronghold.errors import BudgetError
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.lab.records.json_lines import append_record, describe_machine
from stronghold.planner.training_plan import TrainingPlan
from tests.planner.machines import machine

UNIT = 512
"""What the allocator rounds each block up to, in bytes."""


class Mlp(nn.Module):
    """Layers of products and functions, with a dropout where there is one."""

    def __init__(self, width: int, layers: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Dropout(dropout), nn.Linear(inner, width)
            )
            for _ in range(layers)
        )
        self.last = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x).square().mean()


@dataclass(frozen=True)
class Case:
    """A model, the inputs of a step, and what its settings are bound to."""

    kind: str
    sizes: dict[str, Any]
    batch: int
    sequence: int
    dtype: torch.dtype | None
    frozen: bool
    given: dict[str, Any]
    share: float

    @classmethod
    def drawn(cls, seed: int) -> Case:
        draw = random.Random(seed)
        kind = draw.choice(["mlp", "gpt"])
        layers, width = draw.randint(2, 8), 32 * draw.randint(2, 8)
        if kind == "mlp":
            sizes = {
                "width": width,
                "layers": layers,
                "inner": 32 * draw.randint(1, 24),
                "dropout": draw.choice([0.0, 0.1]),
            }
        else:
            sizes = {
                "layers": layers,
                "hidden": width,
                "heads": draw.choice([2, 4]),
                "vocabulary": draw.choice([64, 999, 4000]),
            }
        given: dict[str, Any] = {}
        if draw.random() < 0.4:
            given["activations"] = draw.choice(["recompute", "keep"])
        if draw.random() < 0.4:
            given["update"] = draw.choice(["deferred", "in_backward"])
        if draw.random() < 0.3:
            given["micro_batch"] = draw.choice([None, 1, 2])
        if draw.random() < 0.2:
            given["window"] = draw.randint(1, layers)
        given["accumulate"] = draw.choice([1, 1, 2, 3]) if given.get("update") != "in_backward" else 1
        given["states"] = draw.choice(["fp32", "8bit", ("fp32", "8bit")])
        return cls(
            kind=kind,
            sizes=sizes,
            batch=draw.randint(1, 8),
            sequence=draw.choice([16, 32, 64, 128]),
            dtype=draw.choice([None, torch.bfloat16]),
            frozen=draw.random() < 0.3,
            given=given,
            share=draw.random(),
        )

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module
        if self.kind == "mlp":
            model = Mlp(**self.sizes)
        else:
            model = GPT(GPTConfig(sequence=self.sequence, **self.sizes))
        if self.frozen:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("norm" in name or "0." in name or name.endswith("bias"))
        return model

    def inputs(self, device: str) -> dict[str, torch.Tensor] | tuple[torch.Tensor, ...]:
        if self.kind == "mlp":
            return (torch.ones(self.batch, self.sequence, self.sizes["width"], device=device, dtype=self.dtype),)
        ids = torch.zeros(self.batch, self.sequence, dtype=torch.int64, device=device)
        return {"input_ids": ids, "labels": ids}

    def planned(self, **budget: Any) -> TrainingPlan:
        model, inputs = self.model(), self.inputs("meta")
        return stronghold.plan(
            model, machine=machine(device="soft"), inputs=inputs, dtype=self.dtype, **{**self.given, **budget}
        )

    def peak_bytes(self, settings: dict[str, Any], optimizer: dict[str, Any]) -> int:
        """Returns the most that two steps take of the device."""
        gc.collect()
        torch.accelerator.empty_cache()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        model = stronghold.offload(self.model(), device="soft", dtype=self.dtype, **settings)
        adamw = stronghold.AdamW(model.parameters(), **optimizer)
        inputs = self.inputs("soft")
        for _ in range(2):
            for _ in range(self.given.get("accumulate", 1)):
                out = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
                (out.loss if self.kind == "gpt" else out).backward()
                del out
            adamw.step()
            adamw.zero_grad()
        torch.accelerator.synchronize()
        peak = torch.accelerator.max_memory_allocated() - before
        stronghold.close(model)
        return peak


def judged(seed: int) -> dict[str, Any]:
    """Returns what was said of a case under its cap, and what came of it."""
    case = Case.drawn(seed)
    most = case.planned(device_memory="1GiB").device_bytes
    least = most
    try:
        case.planned(device_memory=1)
    except BudgetError as error:
        least = error.needed["device"]
    lowest = least / 4
    cap = int(lowest * (1.1 * most / lowest) ** case.share)  # as likely to be doubled as halved
    found: dict[str, Any] = {"seed": seed, "cap": cap, "least": least, "most": most}
    try:
        plan = case.planned(device_memory=cap)
    except BudgetError as error:
        found |= {"said": "refused", "planned": error.needed["device"]}
        loose = case.planned(device_memory=error.needed["device"])
        found["peak"] = case.peak_bytes(dict(loose.settings), dict(loose.optimizer))
    else:
        found |= {"said": "fits", "planned": plan.device_bytes, "settings": f"{plan.settings}, {plan.optimizer}"}
        found["peak"] = case.peak_bytes(dict(plan.settings), dict(plan.optimizer))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fits", description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="configurations (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first (default: 0)")
    parser.add_argument("-o", "--output", type=Path, help="append a JSON line for each there")
    options, described = parser.parse_args(), describe_machine()
    wrong = needless = refused = 0
    for seed in range(options.seed, options.seed + options.count):
        found = judged(seed)
        fits = found["peak"] <= found["cap"]
        wrong += found["said"] == "fits" and not fits
        refused += found["said"] == "refused"
        needless += found["said"] == "refused" and fits
        share = found["peak"] / found["planned"]
        print(
            seed,
            found["said"],
            f"{share:.3f}",
            "WRONG" if (found["said"] == "fits") != fits else "",
            found.get("settings", ""),
            flush=True,
        )
        if options.output:
            append_record(options.output, {"benchmark": "fits", **found, **described})
    print(f"{options.count} configurations: {wrong} said to fit did not, {needless} of {refused} refused would have")
    return 1 if wrong else 0


if __name__ == "__main__":
    import tests.accelerator.host  # noqa: F401  (the device is known from here on)

    sys.exit(main())
