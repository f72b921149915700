"""What is published of single cards, beside the plan for such a card: which of it the plan explains, and which not.

    python -m benchmarks.plan_published

The published steps are of other systems; the plan is for this engine on a machine with the card's published peaks, of
which products are taken to reach a share. Where a batch or a length is not told, the plan is for the batch, up to 64,
of the most tokens/s at 1,024 tokens. The loss is taken chunk by chunk: whole logits of a batch would not fit. Beside it
stand two bounds: products alone, 8 operations for each parameter and token where layers are recomputed and 6 where not,
at what the card is taken to reach. Prints a table, and appends a JSON line a row to results/plan_published.jsonl.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import stronghold
from stronghold.errors import BudgetError
from stronghold.lab.records.json_lines import append_record, describe_machine
from stronghold.planner.machine_file import Attention, MachineFile, Product, Spread
from stronghold.planner.training_plan import TrainingPlan

RESULTS = Path(__file__).parent.parent / "results" / "plan_published.jsonl"
SEQUENCE = 1024
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CHUNK = 1024
"""Tokens whose logits are there at a time."""


@dataclass(frozen=True)
class Card:
    """A card by its maker's numbers: dense bf16 FLOP/s summed in fp32, bytes/s of its memory, bytes/s of its link.

    ``share`` of the first is what large products reach. ``host`` are the bytes/s of the host's memory.
    """

    name: str
    flops: float
    share: float
    memory_bytes: int
    memory: float
    link: float
    host: float


GIB = 2**30
CARDS = {
    "4090": Card("RTX 4090", 165.2e12, 0.9, 24 * GIB, 1.008e12, 25e9, 80e9),
    "5090": Card("RTX 5090", 209.5e12, 0.9, 32 * GIB, 1.792e12, 50e9, 80e9),
    "H100": Card("H100 SXM", 989e12, 0.72, 80 * GIB, 3.35e12, 50e9, 250e9),
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
QWEN25 = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}


@dataclass(frozen=True)
class Row:
    """A published number: seconds of a step over ``batch`` samples, or tokens/s where the batch is not told."""

    system: str
    model: str
    config: dict[str, Any]
    card: str
    host_bytes: int
    batch: int | None
    tokens_per_s: float
    remark: str


ROWS = [
    *(
        Row("ZeRO-3 offload", "Llama 8 B", LLAMA, "4090", 256 * GIB, batch, batch * SEQUENCE / step_s, remark)
        for batch, step_s, remark in (
            (8, 8.97, "a step's fixed 5.8 s: updates and copies that nothing hides"),
            (16, 11.93, "the same"),
            (
                32,
                18.30,
                "0.40 s for each further sample: 123 TFLOPS if nothing is recomputed, the card's peak if all is",
            ),
        )
    ),
    Row("FlexTrain", "Llama 8 B", LLAMA, "5090", 192 * GIB, None, 3723, "not told: batch, length, precision"),
    Row("FlexTrain", "Qwen3 8 B", QWEN3, "5090", 192 * GIB, None, 3533, "not told: batch, length, precision"),
    Row("LLMQ, bf16", "Qwen2.5 7 B", QWEN25, "4090", 128 * GIB, None, 1900, "not told: batch, host"),
    Row("LLMQ, fp8", "Qwen2.5 7 B", QWEN25, "4090", 128 * GIB, None, 3000, "products in fp8, which is not planned for"),
    Row("LLMQ", "Qwen2.5 7 B", QWEN25, "5090", 128 * GIB, None, 3100, "not told: batch, host, bf16 or fp8"),
    Row("LLMQ", "Qwen2.5 7 B", QWEN25, "H100", 512 * GIB, None, 14000, "not told: batch, host, bf16 or fp8"),
]
NOT_PLANNED = (
    "OLMoE on a 5090 (FlexTrain, 13,305 tokens/s): which experts compute depends on values, which a plan lacks"
)


class WithLoss(nn.Module):
    """A causal model of transformers with its loss, whose logits are there for some tokens at a time."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM

        whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config, tie_word_embeddings=False))
        self.model, self.head = whole.model, whole.lm_head

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
        pieces = zip(hidden.split(CHUNK), ids.flatten().split(CHUNK), strict=True)
        return torch.stack([checkpoint(self._loss, *piece, use_reentrant=False) for piece in pieces]).mean()

    def _loss(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden).float(), ids)


def machine_of(card: Card, host_bytes: int) -> MachineFile:
    """Returns the card and its host as a file of a machine that was measured would have them."""

    def exactly(value: float) -> Spread:
        return Spread(value, value, value)

    # Weight and remainder, 2 bytes each, and both moments in fp32 are read and written, the gradient is read.
    update = exactly(1e9 * (2 * (2 + 2 + 8) + 2) / card.host)
    link = dict.fromkeys(("h2d", "d2h"), exactly(card.link)) | dict.fromkeys(
        ("h2d_beside_d2h", "d2h_beside_h2d"), exactly(0.85 * card.link)
    )
    elements = {dtype: exactly(0.9 * card.memory) for dtype in ("float32", "bfloat16")}
    rates = {"float32": card.flops / 4, "bfloat16": card.flops * card.share}
    return MachineFile(
        device="cuda",
        device_name=card.name,
        is_host=False,
        runs_behind=True,
        device_memory_bytes=card.memory_bytes,
        host_memory_bytes=host_bytes,
        cores=16,
        processor="",
        time="",
        versions={},
        link={**link, "h2d_pageable": exactly(0.4 * card.link), "copy_s": exactly(1e-5)},
        matmul=[
            Product(dtype, (size, size, size), exactly(rate * part))
            for dtype, rate in rates.items()
            for size, part in ((512, 0.4), (4096, 1.0))
        ],
        attention=[
            Attention(dtype, (8, 32, SEQUENCE, SEQUENCE, 128), exactly(0.6 * rate), exactly(0.45 * rate))
            for dtype, rate in rates.items()
        ],
        elementwise=elements,
        elementwise_cached={dtype: exactly(2 * one.likely) for dtype, one in elements.items()},
        transcendental=elements,
        cache_bytes=50 * 2**20,
        op_s=exactly(4e-6),
        launch_s=exactly(5e-6),
        host_update_ns={"bfloat16+fp32": dict.fromkeys(("alone", "beside_compute"), update)},
        compute_beside_update=exactly(1.0),
        device_update_ns={"bfloat16+fp32": exactly(1e9 * 26 / (0.9 * card.memory))},
        disks={},
    )


def planned(model: nn.Module, row: Row, batch: int) -> TrainingPlan | None:
    """Returns the plan for a batch, or None where nothing fits."""
    ids = torch.empty((batch, SEQUENCE), dtype=torch.int64, device="meta")
    card = machine_of(CARDS[row.card], row.host_bytes)
    try:
        return stronghold.plan(
            model, machine=card, inputs=(ids,), sequence=SEQUENCE, dtype=torch.bfloat16, layers="model.layers"
        )
    except BudgetError:
        return None


def fastest(model: nn.Module, row: Row, batches: Sequence[int]) -> TrainingPlan:
    """Returns the plan of the most tokens/s."""
    plans = [plan for batch in batches if (plan := planned(model, row, batch)) is not None]
    return max(plans, key=lambda plan: plan.tokens_per_s)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    console, described = Console(width=200), describe_machine()
    columns = ("system", "model", "card", "batch", "published", "planned", "of it", "recomputed", "kept", "remark")
    table = Table(*columns, title="tokens/s")
    models: dict[str, nn.Module] = {}
    for row in ROWS:
        if row.model not in models:
            with torch.device("meta"):
                models[row.model] = WithLoss(row.config)
        plan = fastest(models[row.model], row, BATCHES if row.batch is None else (row.batch,))
        ratio = plan.tokens_per_s / row.tokens_per_s
        reached = CARDS[row.card].flops * CARDS[row.card].share / plan.parameters
        bounds = {"recomputed": reached / 8, "kept": reached / 6}
        found = {
            "system": row.system,
            "model": row.model,
            "parameters": plan.parameters,
            "card": asdict(CARDS[row.card]),
            "host_bytes": row.host_bytes,
            "sequence": SEQUENCE,
            "batch": plan.samples,
            "batch_is_told": row.batch is not None,
            "published_tokens_per_s": row.tokens_per_s,
            "planned_tokens_per_s": plan.tokens_per_s,
            "bounds_tokens_per_s": bounds,
            "settings": {**plan.settings, **plan.optimizer},
            "longest": plan.longest,
            "remark": row.remark,
        }
        append_record(str(RESULTS), {**found, "machine": described})
        table.add_row(
            row.system,
            row.model,
            row.card,
            f"{plan.samples}{'' if row.batch is not None else ' (chosen)'}",
            f"{row.tokens_per_s:,.0f}",
            f"{plan.tokens_per_s:,.0f}",
            f"{ratio:.2f}",
            f"{bounds['recomputed']:,.0f}",
            f"{bounds['kept']:,.0f}",
            row.remark,
        )
    console.print(table)
    console.print(f"not planned: {NOT_PLANNED}")


if __name__ == "__main__":
    main()
