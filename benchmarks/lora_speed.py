"""LoRA over a base that streams beside PEFT's with all of it on the device: how fast, in one run.

    python benchmarks/lora_speed.py [--device cuda] [--layers 4] [--hidden 1024] [--batch 4] [--sequence 512]

Trains a Llama with a frozen base in bf16 and adapters in fp32 in four ways, a step of each in turn, so that a machine
whose speed changes does so for all: PEFT with torch's fused AdamW, layers computed again in the backward pass or not,
and the same with the base offloaded and a window of two. The losses must be equal, to the bit with torch's AdamW;
here they may differ by what the two AdamWs round. Prints a table of medians over the rounds, speed as the ratio to PEFT
with the same activations in the same round, and appends one JSON line a way to results/lora_speed.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn

import stronghold
from stronghold.lab.records.json_lines import append_record, describe_machine

RESULTS = Path(__file__).parent.parent / "results" / "lora_speed.jsonl"
RECORDED = ("layers", "hidden", "batch", "sequence", "rank", "device")
ACTIVATIONS = ("recompute", "keep")


class Way:
    """One row: a model with its optimizer, and the seconds and losses of its steps."""

    def __init__(self, activations: str, options: argparse.Namespace, *, window: int | None) -> None:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=options.hidden,
            intermediate_size=options.hidden * 11 // 4,
            num_hidden_layers=options.layers,
            num_attention_heads=options.hidden // 64,
            vocab_size=options.vocabulary,
            use_cache=False,
        )
        base = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        adapters = peft.LoraConfig(r=options.rank, target_modules="all-linear")
        model: Any = peft.get_peft_model(base, adapters).train()
        self.activations, self.window, self.device = activations, window, options.device
        if window is None:
            model.to(options.device)
            if activations == "recompute":
                model.enable_input_require_grads()
                model.gradient_checkpointing_enable({"use_reentrant": False})
            trained = [p for p in model.parameters() if p.requires_grad]
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        else:
            stronghold.offload(model, device=options.device, window=window, activations=activations)
            self.optimizer = stronghold.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        self.model: nn.Module = model
        self.seconds: list[float] = []
        self.losses: list[float] = []

    @property
    def name(self) -> str:
        where = "PEFT" if self.window is None else f"offloaded, window {self.window}"
        return f"{where}, {self.activations}"

    def step(self, tokens: torch.Tensor) -> None:
        begin = time.perf_counter()
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        if self.device != "cpu":
            torch.accelerator.synchronize()
        self.seconds.append(time.perf_counter() - begin)


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    ways = [Way(activations, options, window=window) for activations in ACTIVATIONS for window in (None, 2)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(options.warm + options.rounds):
        tokens = torch.randint(0, options.vocabulary, (options.batch, options.sequence), generator=generator)
        for way in ways:
            way.step(tokens.to(options.device))
    beside = {way.activations: way for way in ways if way.window is None}
    table = Table(title=f"LoRA over {options.layers} layers of {options.hidden} in bf16", title_justify="left")
    for column in ("way", "step", "speed", "spread", "loss"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for way in ways:
        other = beside[way.activations]
        steps = way.seconds[options.warm :]
        ratios = sorted(its / own for its, own in zip(other.seconds[options.warm :], steps, strict=True))
        apart = max(abs(a - b) / abs(b) for a, b in zip(way.losses, other.losses, strict=True))
        table.add_row(
            way.name,
            f"{statistics.median(steps):.2f} s",
            f"{statistics.median(ratios):.3f}",
            f"{ratios[0]:.3f}-{ratios[-1]:.3f}",
            f"{apart:.1e}",
        )
        record = {
            "activations": way.activations,
            "window": way.window,
            **{name: getattr(options, name) for name in RECORDED},
            "steps_s": steps,
            "speed": statistics.median(ratios),
            "ratios": ratios,
            "loss_apart": apart,
            "machine": describe_machine(),
        }
        append_record(options.out, record)
    Console().print(table)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", metavar="NAME", help="where layers compute (default: cpu)")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="(default: 4)")
    parser.add_argument("--hidden", type=int, default=1024, metavar="N", help="(default: 1024)")
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="(default: 4)")
    parser.add_argument("--sequence", type=int, default=512, metavar="N", help="(default: 512)")
    parser.add_argument("--rank", type=int, default=8, metavar="N", help="of the adapters (default: 8)")
    parser.add_argument("--vocabulary", type=int, default=4096, metavar="N", help="(default: 4096)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="timed steps of each way (default: 5)")
    parser.add_argument("--warm", type=int, default=1, metavar="N", help="steps before them (default: 1)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="where to append the records")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
