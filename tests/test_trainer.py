"""transformers.Trainer trains an offloaded model as it trains any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.reference import CASES, Batch, Case, offloaded, ordinary

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    yield
    torch.set_num_threads(before)


class Samples(torch.utils.data.Dataset):
    def __init__(self, case: Case, count: int, seed: int = 1) -> None:
        self.samples = [{k: v[0] for k, v in batch.items()} for batch in case.batches(count, size=1, seed=seed)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Batch:
        return self.samples[number]


class Losses(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.training: list[float] = []
        self.evaluation: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        self.training += [logs["loss"]] if logs and "loss" in logs else []
        self.evaluation += [logs["eval_loss"]] if logs and "eval_loss" in logs else []


def trained(
    directory: Path,
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    resume: str | None = None,
    **settings: Any,
) -> tuple[Losses, transformers.Trainer]:
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 1.0,
        "max_steps": 12,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    losses = Losses()
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(str(directory), **(arguments | settings)),
        train_dataset=Samples(case, 40),
        eval_dataset=Samples(case, 6, seed=2),
        optimizers=(optimizer, transformers.get_linear_schedule_with_warmup(optimizer, 4, 12)),
        callbacks=[losses],
    )
    trainer.train(resume_from_checkpoint=resume)
    return losses, trainer


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_trainer_trains_an_offloaded_model_unchanged(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model, optimizer = offloaded(case, window=2)
    losses, trainer = trained(tmp_path, case, model, optimizer)
    plain, adamw = ordinary(case)
    expected, plain_trainer = trained(tmp_path, case, plain, adamw)
    assert len(losses.training) == 12
    assert len(losses.evaluation) == 3
    torch.testing.assert_close(losses.training, expected.training, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses.evaluation, expected.evaluation, rtol=1e-5, atol=0.0)
    for (key, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.dist(parameter, other) <= 1e-4 * other.norm(), key
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain_trainer.evaluate()["eval_loss"], rel=1e-5)

    trainer.save_model(str(tmp_path / "saved"))
    loaded = type(plain).from_pretrained(tmp_path / "saved")
    for (key, parameter), saved in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(parameter, saved), key


def test_clipping_may_be_left_to_the_optimizer(tmp_path: Path) -> None:
    case = CASES["llama"]
    model, optimizer = offloaded(case, window=2, adamw={"max_grad_norm": 0.5})
    losses, _ = trained(tmp_path, case, model, optimizer, max_grad_norm=0.0)
    expected, _ = trained(tmp_path, case, *ordinary(case), max_grad_norm=0.5)
    torch.testing.assert_close(losses.training, expected.training, rtol=1e-5, atol=1e-6)


def test_the_trainer_resumes_from_its_own_checkpoint(tmp_path: Path) -> None:
    """It saves and loads model and optimizer by their state dictionaries."""
    case, saving = CASES["llama"], {"save_strategy": "steps", "save_steps": 6}
    whole, _ = trained(tmp_path, case, *offloaded(case, window=2), **saving)
    resumed, _ = trained(tmp_path, case, *offloaded(case, window=1), resume=str(tmp_path / "checkpoint-6"), **saving)
    assert resumed.training[-6:] == whole.training[-6:]
    assert resumed.evaluation[-1:] == whole.evaluation[-1:]
