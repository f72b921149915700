"""`stronghold finetune`: reads, checks and plans, says what it is going to do, trains, and saves."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, TextIO, cast

import torch
from rich.console import Console
from torch import nn

from stronghold.checkpoint.pretrained import check_save_folder
from stronghold.engine import report
from stronghold.errors import NonFiniteGradientError
from stronghold.lab.finetuning.checkpoints import check_empty, check_same, newest
from stronghold.lab.finetuning.encoded import Encoded, encode_rows, held_out
from stronghold.lab.finetuning.model import build_base, place, settled
from stronghold.lab.finetuning.rows import read_rows
from stronghold.lab.finetuning.settings import FinetuneSettings
from stronghold.lab.finetuning.shown import before_rows, data_line
from stronghold.lab.finetuning.tokens import Encoder, load_chat_tokenizer
from stronghold.lab.models.files import vocabulary_of
from stronghold.lab.outputs import plain_console
from stronghold.lab.receipt import receipt_rows
from stronghold.lab.records.json_lines import describe_machine
from stronghold.lab.records.runlog import RunLog, check_begins_anew, check_run_folder, check_told, to_go_on
from stronghold.lab.records.runs import Summary, summarize
from stronghold.lab.run_folder import taken
from stronghold.lab.stops import Output, Stop, taking_signals
from stronghold.lab.training import TrainingError
from stronghold.tables import table

PACKAGES = ("transformers", "trl", "peft", "datasets")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run came to. ``saved`` is the folder of its model, None where it was interrupted."""

    summary: Summary
    interrupted: bool
    saved: str | None
    exit_code: int


def finetune(settings: FinetuneSettings, *, console: Console | None = None) -> Outcome:
    """Fine-tunes as ``settings`` say, and shows it on ``console``.

    SIGINT, SIGTERM and SIGHUP end it after the step under way with a checkpoint, and so it ends when nobody reads the
    standard output any more; a second SIGINT or SIGTERM ends the process at once. Raises ValueError or StrongholdError
    for settings, data, models and checkpoints that do not fit, and for places that cannot be written, before anything
    is trained or written; TrainingError for a step that fails, OSError for a file that cannot be written any more,
    ModuleNotFoundError for a package that is not installed.
    """
    for name in ("datasets", "peft", "trl"):
        if find_spec(name) is None:  # said before anything is read; they import for seconds
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    stop = Stop()
    console = console or plain_console(file=cast(TextIO, Output(stop)))
    check_told(settings.flat())
    settings.check_outputs()
    check_save_folder(settings.save)
    _check_wandb(settings)
    with taken(settings.out) if settings.resume else nullcontext():  # one that begins has no folder yet
        model = build_base(settings.model, adapters=settings.adapters, dtype=settings.dtype, sequence=settings.sequence)
        with _quiet():
            return _finetune(settings, model, console, stop)


def _finetune(settings: FinetuneSettings, model: nn.Module, console: Console, stop: Stop) -> Outcome:
    def say(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False, highlight=False)

    found, damaged = newest(settings.out, say) if settings.resume else (None, set())
    if not settings.resume:
        check_run_folder(settings.out)
        check_empty(settings.out)
    tokenizer = load_chat_tokenizer(settings.model)
    training, evaluation = _data(settings, tokenizer, vocabulary_of(model))
    fingerprint = training.fingerprint
    say(data_line("data", settings.data.data, training))
    if evaluation is not None:
        where = settings.data.eval_data or f"{settings.data.held_out:,} rows held out"
        say(data_line("evaluation", where, evaluation))
    if found is not None:
        settings = settings.as_begun(found.learned)
        check_same(found, settings.learned(), fingerprint)
    elif settings.resume:
        check_begins_anew(settings.out)
        say(f"resume     no whole checkpoint in {settings.out} yet: beginning with step 1")

    from stronghold.lab.finetuning.packing import check_apart
    from stronghold.lab.finetuning.trainer import check_scheduler, make_trainer, save_model
    from stronghold.lab.finetuning.watch import Watch

    check_scheduler(settings)
    model = place(model, settings, inputs=_inputs(settings, training) if settings.plans else None)
    placed, settings = report(model), settled(model, settings)
    if settings.data.packing:
        check_apart(model, vocabulary=vocabulary_of(model), device=torch.device(settings.device))
    trainer = make_trainer(
        model,
        tokenizer,
        settings,
        data=training.dataset,
        evaluation=None if evaluation is None else evaluation.dataset,
    )
    if found is not None:
        say(f"resume     from {found.path}, after step {found.step}")
    start = {
        "settings": settings.flat(),
        "machine": describe_machine(PACKAGES),
        "parameters": placed.parameters,
        "placement": {name: getattr(placed, name) for name in ("window", "resident", "device_bytes")},
    }

    done = found.step if found else 0

    def begin(steps: int) -> None:
        console.print(table("plan", before_rows(settings, placed, steps=steps, done=done), console.width))

    after = found.step if found else (0 if settings.resume else None)
    # A signal while the model is saved must not lose it: the save is waited for, as a step is.
    with taking_signals(stop), RunLog(settings.out, text=settings.log, after=after) as log, taken(settings.out):
        if log.lost:
            say(log.lost)
        log.start(start)
        watch = Watch(
            settings,
            data=fingerprint,
            damaged=damaged,
            console=console,
            log=log,
            stop=stop,
            report=lambda: report(model),
            begin=begin,
        )
        trainer.add_callback(watch)
        try:
            trainer.train(resume_from_checkpoint=None if found is None else str(found.path))
        except OSError:
            if (kept := watch.saved or (found.path if found else None)) is not None:
                say(f"kept       {kept}; {to_go_on(settings.out)}")
            raise
        except NonFiniteGradientError as error:
            raise TrainingError(
                f"step {watch.done + 1} failed: {error.found}; lower --lr, warm up (--warmup), clip (--clip), or "
                "check the model's weights and the rows"
            ) from error
        except Exception as error:
            if not watch.total:  # nothing was trained yet
                raise
            what = str(error) or type(error).__name__
            raise TrainingError(f"step {watch.done + 1} failed: {what}") from error
        finally:
            watch.close()
        if not watch.steps:
            raise ValueError(
                f"there must be steps left to train, or a log of those that were (got a checkpoint after step "
                f"{watch.done} of {watch.total}); begin a run in another folder"
            )
        interrupted = stop.asked and watch.done < watch.total
        saved = None if interrupted else settings.save
        if interrupted:
            say(f"interrupted after step {watch.done} of {watch.total}; kept in {watch.saved}")
            say(to_go_on(settings.out))
        else:
            save_model(model, settings.save, tokenizer)
            what = "adapters" if settings.adapters else "model"
            say(f"{what + ' saved in':<10} {saved}, with the tokenizer")
        losses = [one["loss"] for one in watch.evaluations]
        summary = summarize(start, watch.steps, held_out_loss=losses[-1] if losses else None)
        log.end({"interrupted": interrupted, "saved": saved}, summary)
    ended = report(model)
    console.print(replace(ended, planned=None))  # which has the last step beside its plan: one is chance
    console.print(table("summary", summary.rows(), console.width))
    if ended.planned is not None:
        rows = receipt_rows(ended.planned.of_passes(settings.accumulate), summary, watch.steps)
        console.print(table("plan", rows, console.width))
    exit_code = stop.exit_code if interrupted else 0
    return Outcome(summary=summary, interrupted=interrupted, saved=saved, exit_code=exit_code)


def _data(settings: FinetuneSettings, tokenizer: Any, ids: int) -> tuple[Encoded, Encoded | None]:
    encode = Encoder(tokenizer, settings.model, ids=ids, loss=settings.data.loss).encode
    data = settings.data
    limits: dict[str, Any] = {"sequence": settings.sequence, "long_rows": data.long_rows}
    training, apart = read_rows(data.data), data.eval_data
    if data.held_out:
        training, others = map(iter, held_out(training, data.held_out))
        apart = data.data
    elif apart is not None:
        others = read_rows(apart)
    encoded = encode_rows(training, encode, source=data.data, **limits)
    return encoded, None if apart is None else encode_rows(others, encode, source=apart, **limits)


def _inputs(settings: FinetuneSettings, training: Encoded) -> dict[str, Any]:
    """Returns the largest batch that a step can have, without values: what it is planned for."""
    if settings.data.packing:  # TRL puts the samples of a batch one behind the other
        shape = (1, settings.batch * settings.sequence)
    else:
        shape = (settings.batch, min(settings.sequence, training.longest))
    ids = torch.empty(shape, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def _check_wandb(settings: FinetuneSettings) -> None:
    if settings.wandb is None:
        return
    from transformers.integrations import is_wandb_available

    if not is_wandb_available():
        raise ValueError(
            f"--wandb logs to Weights & Biases (got --wandb {settings.wandb}, and wandb is not installed); pip install "
            "wandb, or leave it out"
        )
    os.environ.update(WANDB_PROJECT=settings.wandb)  # where transformers' callback reads it


@contextmanager
def _quiet() -> Iterator[None]:
    """Has the libraries show no bars and no notes of their own meanwhile."""
    import datasets
    from transformers.utils import logging

    verbosity, shows = logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    logging.set_verbosity_error()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logging.set_verbosity(verbosity)
        if shows:
            datasets.enable_progress_bars()
