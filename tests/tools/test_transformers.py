"""Trainer and TRL with the optimizer that they make themselves. What they do with ours: tests/test_trainer.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from torch import nn

import stronghold
from tests.reference import CASES
from tests.test_trainer import Samples
from tests.tools.text import SETTINGS, texts, tokenizer

CASE = CASES["llama"]


def trained(trainer: Any) -> list[float]:
    torch.manual_seed(5)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_alike(model: nn.Module, plain: nn.Module, losses: list[float], expected: list[float]) -> None:
    assert len(set(expected)) == len(expected) > 3
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.dist(parameter, other) <= 1e-4 * other.norm(), name


@pytest.mark.parametrize("window", [1, 2, 4, "auto"])
@pytest.mark.parametrize("optim", [None, "adamw_torch", "adafactor", "sgd"])
def test_its_own_optimizers_train_an_offloaded_model(tmp_path: Path, optim: str | None, window: int | str) -> None:
    found = []
    for model in (stronghold.offload(CASE.model(), device="cpu", window=window), CASE.model()):
        settings = {key: value for key, value in SETTINGS.items() if key != "max_length"}
        arguments = transformers.TrainingArguments(str(tmp_path), **settings, **({"optim": optim} if optim else {}))
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Samples(CASE, 24))
        found.append((model, trained(trainer)))
    (model, losses), (plain, expected) = found
    assert_alike(model, plain, losses, expected)


def test_sft_with_its_default_optimizer(tmp_path: Path) -> None:
    found = []
    for model in (stronghold.offload(CASE.model(), device="cpu", window=2), CASE.model()):
        trainer = trl.SFTTrainer(
            model=model,
            args=trl.SFTConfig(str(tmp_path), **SETTINGS),
            train_dataset=texts(),
            processing_class=tokenizer(),
        )
        found.append((model, trained(trainer)))
    (model, losses), (plain, expected) = found
    assert_alike(model, plain, losses, expected)
