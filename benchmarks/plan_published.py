"""What is published of single cards, beside the plan for such a card: which of it the plan explains, and which not.

    python -m benchmarks.plan_published [--only OLMoE]

The published steps are of other systems; the plan is for this engine on a machine with the card's published peaks, of
which products are taken to reach a share. Where a batch or a length is not told, the plan is for the batch, up to 64,
of the most tokens/s at 1,024 tokens. The loss is taken chunk by chunk: whole logits of a batch would not fit. Beside it
stand two bounds: products alone, 8 operations for each parameter and token where layers are recomputed and 6 where not,
at what the card is taken to reach; of a mixture's parameters those count that a token is routed to. Prints a table, and
appends a JSON line a row to results/plan_published.jsonl.
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
from stronghold.planner.cards import GIB, card_named, machine_of_card
from stronghold.planner.training_plan import TrainingPlan

RESULTS = Path(__file__).parent.parent / "results" / "plan_published.jsonl"
SEQUENCE = 1024
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CHUNK = 1024
"""Tokens whose logits are there at a time."""
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
OLMOE = {
    "model_type": "olmoe",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "vocab_size": 50304,
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
    Row("FlexTrain", "OLMoE 1 B of 7", OLMOE, "5090", 192 * GIB, None, 13305, "not told: batch, length, precision"),
    Row("LLMQ, bf16", "Qwen2.5 7 B", QWEN25, "4090", 128 * GIB, None, 1900, "not told: batch, host"),
    Row("LLMQ, fp8", "Qwen2.5 7 B", QWEN25, "4090", 128 * GIB, None, 3000, "products in fp8, which is not planned for"),
    Row("LLMQ", "Qwen2.5 7 B", QWEN25, "5090", 128 * GIB, None, 3100, "not told: batch, host, bf16 or fp8"),
    Row("LLMQ", "Qwen2.5 7 B", QWEN25, "H100", 512 * GIB, None, 14000, "not told: batch, host, bf16 or fp8"),
]


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


def planned(model: nn.Module, row: Row, batch: int) -> TrainingPlan | None:
    """Returns the plan for a batch, or None where nothing fits."""
    ids = torch.empty((batch, SEQUENCE), dtype=torch.int64, device="meta")
    card = machine_of_card(card_named(row.card), row.host_bytes)
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


def computed_with(config: dict[str, Any], parameters: int) -> int:
    """Returns how many of the parameters a token is computed with: of a mixture's experts those it is routed to."""
    if "num_experts" not in config:
        return parameters
    expert = 3 * config["hidden_size"] * config["intermediate_size"]
    idle: int = config["num_experts"] - config["num_experts_per_tok"]
    return parameters - int(config["num_hidden_layers"]) * idle * int(expert)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PART", help="rows with this in the system's or model's name")
    only = parser.parse_args().only
    console, described = Console(width=200), describe_machine()
    columns = ("system", "model", "card", "batch", "published", "planned", "of it", "recomputed", "kept", "remark")
    table = Table(*columns, title="tokens/s")
    models: dict[str, nn.Module] = {}
    for row in (row for row in ROWS if only in f"{row.system} {row.model}"):
        if row.model not in models:
            with torch.device("meta"):
                models[row.model] = WithLoss(row.config)
        plan = fastest(models[row.model], row, BATCHES if row.batch is None else (row.batch,))
        ratio = plan.tokens_per_s / row.tokens_per_s
        card = card_named(row.card)
        reached = card.bf16 * card.share / computed_with(row.config, plan.parameters)
        bounds = {"recomputed": reached / 8, "kept": reached / 6}
        found = {
            "system": row.system,
            "model": row.model,
            "parameters": plan.parameters,
            "card": asdict(card),
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


if __name__ == "__main__":
    main()
