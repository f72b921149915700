"""Loops of other libraries train adapters over a base that streams, NF4 or not: the bits that they learn in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import lightning
import peft
import pytest
import torch
from torch import Tensor, nn

import stronghold
from tests.adapters import packed_by_bitsandbytes, trained, with_adapters
from tests.reference import CASES, Batch
from tests.tools.test_lightning import QUIET
from tests.tools.test_trl import dpo, grpo, sft

CASE = CASES["llama"]
LORA = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
PLACES: dict[torch.dtype, list[dict[str, Any]]] = {
    torch.float32: [{"window": 1, "store": "disk"}, {"window": 2}, {"window": 4}],
    torch.bfloat16: [{"window": 1}, {"window": 2, "store": "disk"}, {"window": "auto"}],
}


def adapted(dtype: torch.dtype, base: str) -> nn.Module:
    """Returns a Llama in ``dtype`` with adapters, whose layers' linear weights may be in four bits."""
    model: Any = CASE.model().to(dtype)
    if base == "nf4":
        packed_by_bitsandbytes(model, model.model.layers, base, dtype)
    return with_adapters(model, LORA).train()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model), lr=3e-3, weight_decay=0.0, foreach=False)


def compare(place: Path, dtype: torch.dtype, base: str, losses_of: Callable[..., list[float]], steps: int) -> None:
    plain = adapted(dtype, base)
    expected = losses_of(place / "plain", plain, steps)
    assert len(expected) == steps and len(set(expected)) > 1
    for number, settings in enumerate(PLACES[dtype]):
        given = settings | ({"store": str(place / f"store{number}")} if "store" in settings else {})
        model = stronghold.offload(adapted(dtype, base), device="cpu", **given)
        assert losses_of(place / str(number), model, steps) == expected, settings
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(parameter, other), name
        stronghold.close(model)


def samples(steps: int) -> torch.utils.data.DataLoader:
    given = [{key: value[0] for key, value in batch.items()} for batch in CASE.batches(2 * steps, size=1)]
    return torch.utils.data.DataLoader(given, batch_size=2)  # type: ignore[arg-type]


class Module(lightning.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.losses = model, [0.0] * 0

    def configure_optimizers(self) -> Any:
        return adamw(self.model)

    def training_step(self, batch: Batch, number: int) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss


def by_lightning(place: Path, model: nn.Module, steps: int) -> list[float]:
    module = Module(model)
    trainer = lightning.Trainer(
        default_root_dir=place, max_epochs=1, gradient_clip_val=0.5, enable_checkpointing=False, **QUIET
    )
    torch.manual_seed(7)
    trainer.fit(module, samples(steps))
    return module.losses


def by_accelerate(place: Path, model: nn.Module, steps: int) -> list[float]:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, batches = accelerator.prepare(model, adamw(model), samples(steps))
    torch.manual_seed(7)
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(trained(model), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def by_trl(made: Any, steps: int) -> list[float]:
    made.args.max_steps = steps
    torch.manual_seed(5)
    made.train()
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def by_sft(place: Path, model: nn.Module, steps: int) -> list[float]:
    return by_trl(sft(place, model, optimizers=(adamw(model), None)), steps)


def by_dpo(place: Path, model: nn.Module, steps: int) -> list[float]:
    """The reference is the model without its adapters."""
    return by_trl(dpo(place, model, None, optimizers=(adamw(model), None)), steps)


def by_grpo(place: Path, model: nn.Module, steps: int) -> list[float]:
    return by_trl(grpo(place, model, optimizers=(adamw(model), None)), steps)


LOOPS = pytest.mark.parametrize(
    "loop", [by_lightning, by_accelerate, by_sft, by_dpo, by_grpo], ids=lambda loop: loop.__name__
)


@DTYPES
@LOOPS
def test_a_loop_learns_the_same_bits(tmp_path: Path, dtype: torch.dtype, loop: Callable[..., list[float]]) -> None:
    compare(tmp_path, dtype, "nf4", loop, steps=6)


@pytest.mark.long
@pytest.mark.parametrize("base", ["nf4", "plain"])
@DTYPES
@LOOPS
def test_and_for_fifty_steps(tmp_path: Path, dtype: torch.dtype, base: str, loop: Callable[..., list[float]]) -> None:
    compare(tmp_path, dtype, base, loop, steps=50)
