"""transformers.Trainer trains an offloaded model as it trains any other."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.training_args import ParallelMode

import stronghold.trainer
from stronghold.errors import CheckpointError, OffloadedModelError
from stronghold.trainer import KeepEverything
from tests.reference import CASES, Batch, Case, differences, offloaded, ordinary, snapshot

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
        self.norms: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        self.training += [logs["loss"]] if logs and "loss" in logs else []
        self.norms += [logs["grad_norm"]] if logs and "grad_norm" in logs else []
        self.evaluation += [logs["eval_loss"]] if logs and "eval_loss" in logs else []


def trained(
    directory: Path,
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    resume: str | None = None,
    callbacks: Sequence[transformers.TrainerCallback] = (),
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
        callbacks=[losses, *callbacks],
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


def test_in_backward_trains_and_logs_the_norm_that_it_asks_for(tmp_path: Path) -> None:
    case, settings = CASES["llama"], {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1, "eval_strategy": "no"}
    model, optimizer = offloaded(case, window=2, adamw={"update": "in_backward"})
    losses, _ = trained(tmp_path, case, model, optimizer, **settings)
    expected, _ = trained(tmp_path, case, *ordinary(case), **settings)
    assert len(losses.norms) == 12
    torch.testing.assert_close(losses.training, expected.training, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses.norms, expected.norms, rtol=1e-5, atol=0.0)

    model, optimizer = offloaded(case, window=2, adamw={"update": "in_backward"})
    with pytest.raises(OffloadedModelError, match=r"gradients cannot be scaled .*max_grad_norm=0 in transformers"):
        trained(tmp_path, case, model, optimizer, **settings | {"max_grad_norm": 0.01})


def test_the_trainer_resumes_from_its_own_checkpoint(tmp_path: Path) -> None:
    """It saves and loads model and optimizer by their state dictionaries."""
    case, saving = CASES["llama"], {"save_strategy": "steps", "save_steps": 6}
    whole, _ = trained(tmp_path, case, *offloaded(case, window=2), **saving)
    resumed, _ = trained(tmp_path, case, *offloaded(case, window=1), resume=str(tmp_path / "checkpoint-6"), **saving)
    assert resumed.training[-6:] == whole.training[-6:]
    assert resumed.evaluation[-1:] == whole.evaluation[-1:]


SAVING: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 6,
    "eval_strategy": "no",
    "accelerator_config": {"use_seedable_sampler": False},  # the samples' order is drawn before the states are restored
}


BEST: dict[str, Any] = {
    "eval_strategy": "steps",
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,  # the first
}


def in_bf16(window: int, store: str = "ram", **adamw: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    return offloaded(CASES["llama"], window=window, dtype=torch.bfloat16, store=store, lr=3e-3, adamw=adamw)


@pytest.mark.parametrize("resumed_in", ["its folder", "another", "another, having been moved"])
def test_with_the_callback_a_bf16_run_resumes_to_the_bit(tmp_path: Path, resumed_in: str) -> None:
    case, keep = CASES["llama"], KeepEverything
    model, optimizer = in_bf16(window=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*state dictionaries")
        whole, _ = trained(tmp_path / "run", case, model, optimizer, callbacks=[keep()], **SAVING)
    expected = snapshot(model, optimizer)

    settings, checkpoint = dict(SAVING), tmp_path / "run" / "checkpoint-6"
    if "moved" in resumed_in:
        checkpoint = tmp_path / "moved"
        shutil.move(tmp_path / "run" / "checkpoint-6", checkpoint)
        with pytest.raises(CheckpointError, match=r"folder 'stronghold' was not found .* name the checkpoint in Tr"):
            trained(tmp_path / "next", case, *in_bf16(window=1), resume=str(checkpoint), callbacks=[keep()], **SAVING)
        settings["resume_from_checkpoint"] = str(checkpoint)
    folder = tmp_path / ("run" if resumed_in == "its folder" else "next")
    model, optimizer = in_bf16(window=1, store=str(tmp_path / "store"), update="deferred")
    resumed, _ = trained(folder, case, model, optimizer, resume=str(checkpoint), callbacks=[keep()], **settings)
    assert resumed.training == whole.training[6:]
    assert len(resumed.training) == 6
    assert differences(snapshot(model, optimizer), expected) == []


def test_without_the_callback_the_low_bits_are_lost_and_a_warning_says_so(tmp_path: Path) -> None:
    case = CASES["llama"]
    model, optimizer = in_bf16(window=2)
    with pytest.warns(RuntimeWarning, match=r"goes on from rounded weights.*checkpoint\.save.*KeepEverything") as told:
        trained(tmp_path, case, model, optimizer, **SAVING)
    assert len([one for one in told if "rounded weights" in str(one.message)]) == 1  # for two checkpoints
    expected = snapshot(model, optimizer)
    model, optimizer = in_bf16(window=2)
    trained(tmp_path, case, model, optimizer, resume=str(tmp_path / "checkpoint-6"), **SAVING)
    assert differences(snapshot(model, optimizer), expected)

    # With it such a checkpoint is refused, but not one of an fp32 model, which has lost nothing.
    with pytest.raises(CheckpointError, match="saved without KeepEverything"):
        trained(tmp_path, case, *in_bf16(2), resume=str(tmp_path / "checkpoint-6"), callbacks=[KeepEverything()])


def test_a_checkpoint_of_an_exact_model_without_the_callback_goes_on_with_it(tmp_path: Path) -> None:
    case = CASES["llama"]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*state dictionaries")
        whole, _ = trained(tmp_path, case, *offloaded(case, window=2), **SAVING)
    resumed, _ = trained(
        tmp_path,
        case,
        *offloaded(case, window=2),
        resume=str(tmp_path / "checkpoint-6"),
        callbacks=[KeepEverything()],
        **SAVING,
    )
    assert resumed.training == whole.training[6:]


def test_what_trainer_removes_takes_ours_along_and_the_best_model_has_its_masters(tmp_path: Path) -> None:
    case = CASES["llama"]
    best: dict[str, dict[str, torch.Tensor]] = {}

    class Best(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                best.update(snapshot(model, optimizer))

    model, optimizer = in_bf16(window=2)
    _, trainer = trained(
        tmp_path,
        case,
        model,
        optimizer,
        callbacks=[KeepEverything(), Best()],
        save_strategy="steps",
        save_steps=4,
        max_steps=16,
        save_total_limit=3,
        **BEST,
    )
    assert trainer.state.best_global_step == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-12", "checkpoint-16", "checkpoint-4"]
    assert all((path / "stronghold" / "manifest.json").is_file() for path in tmp_path.iterdir())
    assert differences(snapshot(model, optimizer), best) == []


def test_a_run_that_begins_again_in_its_folder_replaces_what_was_kept(tmp_path: Path) -> None:
    case = CASES["llama"]
    for _ in range(2):
        model, optimizer = in_bf16(window=2)
        whole, _ = trained(tmp_path, case, model, optimizer, callbacks=[KeepEverything()], **SAVING)
    resumed, _ = trained(
        tmp_path,
        case,
        *in_bf16(window=2),
        resume=True,  # type: ignore[arg-type]
        callbacks=[KeepEverything()],
        **SAVING | {"max_steps": 14},
    )
    assert len(whole.training) == 12
    assert len(resumed.training) == 2


@pytest.mark.parametrize("best", [False, True], ids=["", "beside the best one"])
def test_a_kill_while_the_callback_saves_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: bool
) -> None:
    """Trainer has removed one by then: the one before, where it was to keep one, or the best one and another."""
    case, settings = CASES["llama"], SAVING | {"save_steps": 4, "save_total_limit": 2}
    if best:
        settings |= BEST | {"save_steps": 3, "eval_steps": 3, "save_total_limit": 3}
    before = 9 if best else 8
    model, optimizer = in_bf16(window=2)
    whole, _ = trained(tmp_path / "whole", case, model, optimizer, callbacks=[KeepEverything()], **settings)
    expected, save = snapshot(model, optimizer), stronghold.trainer.save

    def killed(folder: Path, *given: Any, **more: Any) -> None:
        if folder.parent.name == "checkpoint-12":
            raise KeyboardInterrupt
        save(folder, *given, **more)

    monkeypatch.setattr(stronghold.trainer, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "run", case, *in_bf16(window=2), callbacks=[KeepEverything()], **settings)
    monkeypatch.undo()
    left = {3, before, 12} if best else {before, 12}
    assert {path.name for path in (tmp_path / "run").iterdir()} == {f"checkpoint-{step}" for step in left}
    keep: dict[str, Any] = {"callbacks": [KeepEverything()]} | settings
    with pytest.raises(CheckpointError, match="folder 'stronghold' was not found"):
        trained(tmp_path / "run", case, *in_bf16(window=2), resume=str(tmp_path / "run" / "checkpoint-12"), **keep)
    model, optimizer = in_bf16(window=1)
    intact = str(tmp_path / "run" / f"checkpoint-{before}")
    resumed, _ = trained(tmp_path / "run", case, model, optimizer, resume=intact, **keep)
    assert resumed.training == whole.training[before:]
    assert len(resumed.training) == 12 - before
    assert differences(snapshot(model, optimizer), expected) == []


def test_what_the_callback_cannot_keep_is_refused_when_training_begins(tmp_path: Path) -> None:
    case, keep = CASES["llama"], [KeepEverything()]
    with pytest.raises(ValueError, match=r"\(got save_only_model=True\); pass save_only_model=False"):
        trained(tmp_path, case, *in_bf16(window=2), callbacks=keep, save_only_model=True)
    saving = {"save_strategy": "steps", "save_steps": 4}
    with pytest.raises(ValueError, match=r"\(got save_total_limit=1\); pass save_total_limit=2 or more"):
        trained(tmp_path, case, *in_bf16(window=2), callbacks=keep, save_total_limit=1, **saving)
    for limit in (1, 2):
        for best in ({"load_best_model_at_end": True}, {"metric_for_best_model": "loss"}):
            told = rf"\(got save_total_limit={limit}, beside the best model's.*pass save_total_limit=3 or more"
            with pytest.raises(ValueError, match=told):
                trained(tmp_path, case, *in_bf16(window=2), callbacks=keep, save_total_limit=limit, **saving, **best)
    trained(tmp_path, case, *in_bf16(window=2), callbacks=keep, save_total_limit=1)  # which saves nothing
    with pytest.raises(OffloadedModelError, match=r"a checkpoint is of an offloaded model \(got a LlamaForCausalLM"):
        trained(tmp_path, case, *ordinary(case), callbacks=keep)
    model, _ = in_bf16(window=2)
    with pytest.raises(OffloadedModelError, match=r"needs the model's own optimizer \(got a torch.optim"):
        trained(tmp_path, case, model, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=keep)
    assert not list(tmp_path.iterdir())


class TwoGPUs(transformers.TrainingArguments):
    """Those of one process that sees two GPUs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._n_gpu = 2


def test_several_gpus_of_one_process_are_refused_when_training_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers, "TrainingArguments", TwoGPUs)
    model, optimizer = offloaded(CASES["llama"], window=2)
    with pytest.raises(OffloadedModelError, match=r"\(got args\.n_gpu=2.*set CUDA_VISIBLE_DEVICES=0"):
        trained(tmp_path, CASES["llama"], model, optimizer, callbacks=[KeepEverything()])
    assert not optimizer.state


class SeveralProcesses(transformers.TrainingArguments):
    """What Trainer finds in each of the processes that torchrun has started."""

    @property
    def parallel_mode(self) -> ParallelMode:
        return ParallelMode.DISTRIBUTED


def test_several_processes_are_refused_when_training_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "TrainingArguments", SeveralProcesses)
    model, optimizer = offloaded(CASES["llama"], window=2)
    with pytest.raises(OffloadedModelError, match=r"parallel_mode=DISTRIBUTED.*train by stronghold\.replicate"):
        trained(tmp_path, CASES["llama"], model, optimizer, callbacks=[KeepEverything()])
    assert not optimizer.state


def test_stronghold_itself_imports_neither_transformers_nor_accelerate() -> None:
    asked = "import stronghold, sys; print([m for m in ('transformers', 'accelerate', 'peft') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_trainer_may_compile_an_offloaded_model(tmp_path: Path) -> None:
    """It wraps the model; its layers run eagerly inside of that, and the wrapper is reported and saved as the model."""
    case, settings = CASES["llama"], {"max_steps": 2, "eval_steps": 2}
    expected, _ = trained(tmp_path, case, *offloaded(case, window=2), **settings)
    model, optimizer = offloaded(case, window=2)
    with pytest.warns(UserWarning, match="leaves the layers"):
        losses, trainer = trained(
            tmp_path, case, model, optimizer, torch_compile=True, torch_compile_backend="eager", **settings
        )
    assert trainer.model_wrapped is not model
    assert (losses.training, losses.evaluation) == (expected.training, expected.evaluation)
    stronghold.save(trainer.model_wrapped, tmp_path / "saved")
    loaded = type(model).from_pretrained(tmp_path / "saved")
    for (key, parameter), saved in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(parameter, saved), key
    # What the process has beside is looked up anew each time.
    reports = [replace(stronghold.report(each), beside_host_bytes=0) for each in (trainer.model_wrapped, model)]
    assert reports[0] == reports[1]
