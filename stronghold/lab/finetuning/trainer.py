"""TRL's SFTTrainer with our optimizer, and checkpoints that are written and read layer by layer."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PrinterCallback, TrainerCallback, get_scheduler
from trl import SFTConfig, SFTTrainer

from stronghold.checkpoint.adapters import has_adapters
from stronghold.checkpoint.pretrained import save_with_others
from stronghold.engine.adamw import AdamW
from stronghold.lab.data.tokenizer_files import is_tokenizer_file, saved_files, write_files
from stronghold.lab.finetuning.adapters import WEIGHTS
from stronghold.lab.finetuning.checkpoints import remove_partial
from stronghold.lab.finetuning.settings import FinetuneSettings
from stronghold.trainer import KeepEverything

if TYPE_CHECKING:
    from datasets import Dataset

SCHEDULER = "scheduler.pt"


class Finetuner(SFTTrainer):
    """SFTTrainer whose checkpoints are ours: no tensor of the whole model or of all states is made for them.

    ``checkpoint-N`` is a model that ``from_pretrained`` loads, or adapters that PEFT loads, with the tokenizer, beside
    what Trainer keeps. Where all weights are trained, :class:`stronghold.trainer.KeepEverything` adds weights, masters
    and states; adapters, which are fp32, and their states are exact in Trainer's own files.
    """

    model: Any
    lr_scheduler: Any

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Writes none: what a run was is in its log."""

    def evaluate(self, *arguments: Any, **more: Any) -> dict[str, float]:
        """Evaluates, and draws no random number of the training: a run may go on with evaluations at other steps.

        Each pass over the rows draws one from torch's generator of the CPU, from which dropout draws there too.
        """
        with torch.random.fork_rng(devices=[]):
            return super().evaluate(*arguments, **more)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        assert output_dir is not None
        if os.path.isdir(output_dir):  # of a run that was killed while it wrote, for else this one had gone on from it
            shutil.rmtree(output_dir)
        remove_partial(os.path.dirname(output_dir))  # first: the disk may be full of them
        save_model(self.model, output_dir, self.processing_class)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not has_adapters(self.model):
            return  # KeepEverything loads it, when training begins
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        set_peft_model_state_dict(self.model, load_file(os.path.join(resume_from_checkpoint, WEIGHTS)))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if has_adapters(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
        else:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if has_adapters(self.model):
            super()._load_optimizer_and_scheduler(checkpoint)
        elif checkpoint is not None:
            self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER), weights_only=True))


def make_trainer(
    model: Any,
    tokenizer: Any,
    settings: FinetuneSettings,
    *,
    data: Dataset,
    evaluation: Dataset | None,
    callbacks: Sequence[TrainerCallback] = (),
) -> Finetuner:
    """Returns the trainer of an offloaded ``model``, with its optimizer; ``data`` has ``input_ids`` and ``labels``.

    Raises ValueError for options that the scheduler does not take.
    """
    check_scheduler(settings)
    course = settings.course
    full = [] if has_adapters(model) else [KeepEverything()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of names that SFTConfig itself uses
        arguments = SFTConfig(
            settings.out,
            per_device_train_batch_size=settings.batch,
            per_device_eval_batch_size=settings.batch,
            gradient_accumulation_steps=settings.accumulate,
            num_train_epochs=settings.epochs,
            max_steps=-1 if settings.steps is None else settings.steps,
            learning_rate=course.lr,
            lr_scheduler_type=course.scheduler,
            lr_scheduler_kwargs=dict(course.scheduler_options),
            warmup_steps=course.warmup,
            weight_decay=course.weight_decay,
            max_grad_norm=course.max_grad_norm or 0.0,
            seed=settings.seed,
            logging_steps=1,
            logging_nan_inf_filter=False,
            eval_strategy="no" if evaluation is None else "steps",
            eval_steps=settings.eval_every or 1,  # the latter until the steps of an epoch are known
            save_strategy="no" if settings.checkpoint_every is None else "steps",
            save_steps=settings.checkpoint_every or 500,
            save_total_limit=None,  # what is too many goes when the new one is whole
            packing=settings.data.packing,
            packing_strategy="bfd",
            max_length=settings.sequence if settings.data.packing else None,  # rows are no longer: they were checked
            # An epoch's order is by its number and this seed: a resumed run draws it before its states are put back.
            accelerator_config={"use_seedable_sampler": True},
            data_seed=settings.seed,
            report_to=["wandb"] if settings.wandb else [],
            run_name=os.path.basename(os.path.abspath(settings.out)),
            use_cpu=settings.device == "cpu",
            bf16=False,  # the model computes in its own type
            gradient_checkpointing=False,  # the engine recomputes layers
            disable_tqdm=True,
            dataloader_pin_memory=settings.device != "cpu",
        )
        arguments._n_gpu = min(1, arguments.n_gpu)  # of several GPUs Trainer would give each a copy of the model
        trainer = Finetuner(
            model=model,
            args=arguments,
            train_dataset=data,
            eval_dataset=evaluation,
            processing_class=tokenizer,
            callbacks=[*full, *callbacks],
        )
    trainer.remove_callback(PrinterCallback)
    if evaluation is not None and settings.eval_every is None:
        batches = len(trainer.get_train_dataloader())
        arguments.eval_steps = max(1, batches // settings.accumulate + (batches % settings.accumulate > 0))
    trainer.optimizer = _optimizer(trainer, settings)
    return trainer


def check_scheduler(settings: FinetuneSettings) -> None:
    """Raises ValueError for options that the scheduler does not take, or that it needs and that are not given."""
    course = settings.course
    try:
        get_scheduler(
            course.scheduler,
            torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=course.lr),
            num_warmup_steps=0,
            num_training_steps=settings.steps or 10,
            scheduler_specific_kwargs=dict(course.scheduler_options),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a scheduler takes options of its own (got {course.scheduler!r} with {dict(course.scheduler_options)}: "
            f"{error}); pass --scheduler-options NAME=VALUE, or another scheduler"
        ) from error


def save_model(model: nn.Module, folder: str | Path, tokenizer: Any) -> None:
    """Saves the model, or its adapters, layer by layer, with the tokenizer. Raises OSError, naming the folder."""
    save_with_others(model, folder, partial(write_files, saved_files(tokenizer)), is_tokenizer_file)


def _optimizer(trainer: Finetuner, settings: FinetuneSettings) -> AdamW:
    course = settings.course
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    trained = [(name, p) for name, p in trainer.model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in trained if name in decayed], "weight_decay": course.weight_decay},
        {"params": [p for name, p in trained if name not in decayed], "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=course.lr,
        betas=course.betas,
        eps=course.eps,
        states=course.states,
        update=settings.update,
    )
