"""What ``transformers.Trainer`` lacks to go on to the bit: a callback that adds everything to its checkpoints."""

from __future__ import annotations

import os
import uuid
import warnings
from pathlib import Path
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.training_args import ParallelMode

from stronghold.checkpoint import load, save
from stronghold.checkpoint.folder import remove
from stronghold.checkpoint.plain import from_plain
from stronghold.checkpoint.random_states import put_random_states, take_random_states
from stronghold.checkpoint.unit_tensors import engine_for
from stronghold.engine import Engine
from stronghold.engine.adamw import AdamW
from stronghold.errors import CheckpointError, OffloadedModelError
from stronghold.formats.manifest import NAME, read_manifest
from stronghold.unit import from_rank0

FOLDER = "stronghold"
"""Where in each ``checkpoint-N`` of Trainer's the callback keeps everything."""


class KeepEverything(TrainerCallback, ExportableState):
    """Has each ``checkpoint-N`` that Trainer writes keep everything, and a resumed run go on from it to the bit.

    Trainer saves weights as the model computes with them: of fp32 masters beside bf16 weights it loses the low bits.
    This callback calls :func:`stronghold.checkpoint.save` into ``checkpoint-N/stronghold``, and
    :func:`stronghold.checkpoint.load` when a run resumes, after Trainer has loaded what it saved, and when Trainer has
    loaded the best model at the end of training. The learning rate's schedule, the random states and the position in
    the data are Trainer's own, which keeps those exactly.

    Trainer does not tell its callbacks which checkpoint it resumes from. A mark in Trainer's own ``trainer_state.json``
    and in ours says which two belong together: the folder is looked for in ``args.output_dir``, where it was saved, and
    in ``args.resume_from_checkpoint``.

    Raises OffloadedModelError when training begins where the model is not offloaded, the optimizer is not its
    :class:`stronghold.AdamW`, or Trainer would train on several GPUs of one process or in several processes, ValueError
    for ``save_only_model=True`` and for a ``save_total_limit`` below 2, or 3 where Trainer keeps a best model too, with
    which a process that is killed while this callback saves would not leave the checkpoint before, and CheckpointError
    where the checkpoint that Trainer resumes from is found without ours, and lost bits by that.
    """

    def __init__(self) -> None:
        self._mark = ""
        self._output = ""

    def state(self) -> dict[str, Any]:
        """Returns what Trainer writes into ``trainer_state.json``: a new mark for each checkpoint."""
        self._mark = uuid.uuid4().hex
        return {"args": {}, "attributes": {"_mark": self._mark, "_output": self._output}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called when Trainer has loaded the checkpoint that it resumes from, if any."""
        if args.save_only_model:
            raise ValueError(
                "KeepEverything needs the random states that Trainer keeps in its checkpoints (got "
                "save_only_model=True); pass save_only_model=False, or leave the callback out"
            )
        _check_total_limit(args, state)
        if args.n_gpu > 1:
            raise OffloadedModelError(
                f"Trainer trains an offloaded model on one GPU of a process (got args.n_gpu={args.n_gpu}, to each of "
                "which it would copy the model by torch.nn.DataParallel); set CUDA_VISIBLE_DEVICES=0, or train by "
                "stronghold.replicate and a loop of your own in one process per GPU, which torchrun starts"
            )
        if args.parallel_mode == ParallelMode.DISTRIBUTED:
            raise OffloadedModelError(
                "Trainer trains an offloaded model in one process (got args.parallel_mode=DISTRIBUTED, whose gradients "
                "DistributedDataParallel would average, which an offloaded model's do not reach); start it without "
                "torchrun, or train by stronghold.replicate and a loop of your own in each process"
            )
        model, optimizer, engine = _trained(given)
        engine.keep_masters(True)
        self._output = os.path.abspath(args.output_dir)
        if state.global_step:
            self._resume(args, state, model, optimizer, engine)
        # Trainer fails at its next checkpoint where the one before did not know of a callback.
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called when Trainer has written a checkpoint of its own."""
        model, optimizer, engine = _trained(given)
        folder = _folder(args.output_dir, state.global_step)
        # Of a run before, whose files Trainer has just overwritten. One process looks: it may be gone for the next.
        from_rank0(engine.processes, lambda: remove(folder) if folder.exists() else None)
        save(folder, model, optimizer, extra={"mark": self._mark})

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called when Trainer has loaded the best model, if it was to."""
        model, optimizer, engine = _trained(given)
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            folder = Path(state.best_model_checkpoint, FOLDER)
            if folder.is_dir():
                _load(folder, model, optimizer, engine)
            elif _has_masters(engine):
                warnings.warn(
                    f"the best model was loaded from {state.best_model_checkpoint}, which was saved without "
                    "KeepEverything: its masters lack their low bits",
                    RuntimeWarning,
                    stacklevel=2,
                )
        engine.keep_masters(False)

    def _resume(self, args: Any, state: Any, model: nn.Module, optimizer: AdamW, engine: Engine) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved is None:
            if not _has_masters(engine):
                return  # what Trainer keeps is exact
            raise CheckpointError(
                f"Trainer resumes at step {state.global_step} from a checkpoint that was saved without KeepEverything, "
                "whose bf16 weights have lost the low bits of their fp32 masters; resume from another, or leave the "
                "callback out to go on from the rounded weights"
            )
        mark, output = saved["attributes"]["_mark"], saved["attributes"]["_output"]
        given = args.resume_from_checkpoint
        places = [_folder(args.output_dir, state.global_step), _folder(output, state.global_step)]
        places += [Path(given, FOLDER)] if isinstance(given, str) else []
        folder = next((place for place in places if _mark_of(place) == mark), None)
        if folder is None:
            tried = ", ".join(dict.fromkeys(map(str, places)))
            raise CheckpointError(
                f"Trainer resumes at step {state.global_step} from a checkpoint whose folder {FOLDER!r} was not found "
                f"(looked at {tried}); name the checkpoint in TrainingArguments(resume_from_checkpoint=...) too, or "
                "resume from another"
            )
        _load(folder, model, optimizer, engine)


def _check_total_limit(args: Any, state: Any) -> None:
    """Raises ValueError where Trainer would remove the checkpoint before while the new one lacks our part.

    Trainer spares the newest checkpoint and the best one, and removes the others down to ``save_total_limit`` before it
    calls ``on_save``. It has a best one where it has a metric for it, or goes on from a run that had.
    """
    limit, best = args.save_total_limit, args.metric_for_best_model is not None or state.best_model_checkpoint
    best = best and args.save_strategy != "best"  # there the newest one is the best
    least = 3 if best else 2
    if args.save_strategy != "no" and limit is not None and 0 < limit < least:  # 0 is none to Trainer
        beside = ", beside the best model's, which Trainer keeps" if best else ""
        raise ValueError(
            "KeepEverything needs the checkpoint before until its own part of a new one is written, and Trainer "
            f"removes it first (got save_total_limit={limit}{beside}); pass save_total_limit={least} or more, or leave "
            "the callback out"
        )


def _trained(given: dict[str, Any]) -> tuple[nn.Module, AdamW, Engine]:
    """Returns the model that is trained, its optimizer without accelerate's wrapper, and its engine."""
    model, optimizer = given["model"], given["optimizer"]
    optimizer = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    return model, optimizer, engine_for(model, optimizer)


def _folder(output: str, step: int) -> Path:
    return Path(output, f"{PREFIX_CHECKPOINT_DIR}-{step}", FOLDER)


def _mark_of(folder: Path) -> str | None:
    """Returns the mark of what the callback has saved in ``folder``, or None where it has not."""
    if not (folder / NAME).is_file():
        return None
    extra = from_plain(read_manifest(folder).extra)
    return extra.get("mark") if isinstance(extra, dict) else None


def _load(folder: Path, model: nn.Module, optimizer: AdamW, engine: Engine) -> None:
    device = engine.device.torch_device
    engine.put_back()  # PEFT's load_adapter makes new parameters, of bf16 ones in fp32
    states = take_random_states(device)  # Trainer puts its own back when it has drawn as often as the run before
    load(folder, model, optimizer)
    put_random_states(states, device)


def _has_masters(engine: Engine) -> bool:
    return any(unit.masters for unit in engine.units)
