"""The one loop that times and trains, whatever the model and the method."""

import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO, cast

import torch
from rich.console import Console
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from stronghold.checkpoint.pretrained import check_save_folder, save_with_others
from stronghold.device import Timeline, limit_memory, open_device
from stronghold.engine.planning.given import check_plan
from stronghold.errors import NonFiniteGradientError, ParallelError, StrongholdError
from stronghold.lab.data.batches import Batches
from stronghold.lab.data.text import read_documents, standard_library
from stronghold.lab.data.tokenizer_files import has_tokenizer, is_tokenizer_file, write_files
from stronghold.lab.data.tokens import (
    BYTES,
    BYTES_NAME,
    ByteTokenizer,
    Tokenizer,
    check_vocabulary,
    load_tokenizer,
    tokenize,
)
from stronghold.lab.methods import Prepared, find_method
from stronghold.lab.methods.parallel import join, records_of
from stronghold.lab.models.files import build_model, longest_sequence_of, vocabulary_of
from stronghold.lab.models.gpt import GPT
from stronghold.lab.outputs import TIMELINE_NAME, plain_console
from stronghold.lab.receipt import receipt_rows
from stronghold.lab.records.json_lines import Record, append_record, check_records, describe_machine
from stronghold.lab.records.progress import StepDisplay
from stronghold.lab.records.runlog import RunLog, check_run_folder, check_told
from stronghold.lab.records.runs import Summary, summarize
from stronghold.lab.records.stages_report import StagesReport
from stronghold.lab.records.timeline import write_spans
from stronghold.lab.run_checkpoints import RunCheckpoints
from stronghold.lab.run_folder import taken
from stronghold.lab.settings import OptimizerSettings, TrainSettings
from stronghold.lab.stops import Output, Stop, taking_signals
from stronghold.planner.training_plan import TrainingPlan
from stronghold.reports import Measured, Report
from stronghold.tables import table
from stronghold.units import format_bytes, format_count
from stronghold.weights import Weights

_OF_A_STEP = ("step", "iteration_s", "disk_read_bytes", "disk_written_bytes")
"""What the record of a run keeps of each step beside its loss; the run's own log has all."""
_SPLIT = ("compute_s", "fetch_wait_s", "update_wait_s", "disk_wait_s", "outside_s")
"""The same, of a method that says where its time goes."""


class TrainingError(StrongholdError):
    """Training began and could not go on; the message says at which step and why."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run came to. ``saved`` is the folder of its model, if it was saved."""

    summary: Summary
    interrupted: bool
    saved: str | None
    exit_code: int


def train(settings: TrainSettings, *, plan: TrainingPlan | None = None, console: Console | None = None) -> Outcome:
    """Trains as ``settings`` say, and shows it on ``console``.

    Where the settings come from a ``plan``, what it expects is shown beside what was measured.

    SIGINT, SIGTERM and SIGHUP end it after the step under way, with the model saved, and a checkpoint where such are
    kept, and so it ends when nobody reads the standard output any more; a second SIGINT or SIGTERM ends the process at
    once. Raises ValueError or StrongholdError for settings, data and checkpoints that do not fit, and for places that
    cannot be written, before anything is trained or written; TrainingError for a step that fails, OSError for a file
    that cannot be written any more. Where the store cannot keep the run at its end, the model is saved all the same,
    and then that is raised.
    """
    with taken(settings.out) if settings.resume and settings.parallel.alone else nullcontext():
        return _train(settings, plan, console)


def _train(settings: TrainSettings, plan: TrainingPlan | None, console: Console | None) -> Outcome:
    stop = Stop()
    console = console or plain_console(file=cast(TextIO, Output(stop)))
    method = find_method(settings.method)
    settings, processes = join(settings)
    run = settings  # whose records these are: of process 0 for the model, of every other one for itself
    if processes.rank:
        run, console = records_of(processes.rank, settings), Console(quiet=True)
    if isinstance(settings.device_limit, int):
        limit_memory(settings.device, settings.device_limit)
    check_told(run.flat())
    run.check_outputs()
    check_records(run.record)
    check_save_folder(run.save_folder)
    if not settings.resume:
        check_run_folder(run.out)
    checkpoints = RunCheckpoints(settings, lambda line: console.print(line, soft_wrap=True, markup=False), processes)
    settings = checkpoints.settings
    torch.manual_seed(settings.seed)
    model, weights = _build_model(settings, console)
    if plan is not None:
        check_plan(plan, model, open_device(settings.device).torch_device, getattr(torch, plan.dtype))
    tokenizer = _load_tokenizer(settings, model)
    batches = _load_batches(settings, tokenizer, console)
    prepared = method.prepare(model, settings, checkpoints.open(weights, batches, tokenizer))
    scheduler = _scheduler(prepared.optimizer, settings)
    checkpoints.begin(prepared.model, prepared.optimizer, scheduler)
    report = prepared.report()
    if report.on_root_disk:
        console.print(
            f"note       {', '.join(report.disk_paths)}: the system's own disk, which each step wears", soft_wrap=True
        )
    start = {
        "settings": settings.flat(),
        "machine": describe_machine(prepared.packages),
        "parameters": report.parameters,
    }
    if isinstance(report, Report):
        start["placement"] = {name: getattr(report, name) for name in ("window", "resident", "device_bytes")}
    after = checkpoints.step if settings.resume else None
    timelines: list[Timeline] = []
    signals = taking_signals(stop, first=processes.rank == 0, alone=processes.world_size == 1)
    # Before what is there is cut, and of a run that begins, when its folder is there.
    with signals, taken(run.out), RunLog(run.out, text=run.log, after=after) as log, taken(run.out):
        if log.lost:
            console.print(log.lost, soft_wrap=True, markup=False, highlight=False)
        log.start(start)
        steps, done = log.steps, checkpoints.step
        with StepDisplay(console, settings.steps) as display:
            for record in _steps(prepared, scheduler, batches, settings, timelines, after=done):
                steps.append(record)
                log.step(record)
                display.step(record)
                done, stopped = record["step"], prepared.agreed(stop.asked)
                if checkpoints.due(done, last=stopped or done == settings.steps):
                    _save_checkpoint(checkpoints, done, log)
                if stopped:
                    break
        if not steps:
            raise ValueError(
                f"there must be steps left to train, or a log of those that were (got steps={settings.steps} and a "
                f"checkpoint after step {done}); pass more steps"
            )
        for timeline in timelines:
            write_spans(os.path.join(run.out, TIMELINE_NAME), timeline.spans())
        interrupted = done < settings.steps
        if interrupted:
            console.print(f"interrupted after step {done} of {settings.steps}")
            if not prepared.saves and settings.checkpoint_every is None:
                why = "its parts are in several processes, which --checkpoint-every saves together"
                if settings.parallel.alone:
                    why = f"{method.name} is there to be compared with"
                console.print(f"the model is not saved: {why}", soft_wrap=True)
        lost: OSError | StrongholdError | None = None
        if settings.keep_store:
            where = settings.offload.directories
            again = f"--store {where[0]}" if len(where) == 1 else "--plan, as before"  # which alone names several
            try:
                _keep_store(checkpoints, done, log)
            except (OSError, StrongholdError) as error:
                lost = error  # the model may still go elsewhere: first that
                said = f"not kept   {', '.join(where)}: {error}"
            else:
                said = (
                    f"kept       {', '.join(where)}: the run after step {done}, {format_bytes(report.disk_bytes)}; to "
                    f"go on: --resume --out {settings.out} {again}"
                )
            console.print(said, soft_wrap=True, markup=False)
        saved = run.save_folder if prepared.saves and (interrupted or lost or run.save) else None
        if saved is not None:
            save_with_others(model, saved, partial(write_files, tokenizer.files), is_tokenizer_file)
            console.print(f"model saved in {saved}", soft_wrap=True)
        if lost is not None:
            raise lost
        held_out_loss = None if interrupted else _held_out_loss(prepared, batches)
        summary = summarize(start, steps, held_out_loss=held_out_loss)
        log.end({"interrupted": interrupted, "saved": saved}, summary)
    if run.record:
        found = {
            "summary": summary.record(),
            "interrupted": interrupted,
            "losses": [step["loss"] for step in steps],
            "steps": [{n: step[n] for n in (*_OF_A_STEP, *(_SPLIT if step["compute_s"] else ()))} for step in steps],
        }
        append_record(run.record, {**start, **found})
    console.print(prepared.report())
    console.print(table("summary", summary.rows(), console.width))
    if plan is not None:
        rows = receipt_rows(plan.planned(), summary, steps, counts_device=plan.processes == 1)
        console.print(table("plan", rows, console.width))
    exit_code = stop.exit_code if interrupted else 0
    return Outcome(summary=summary, interrupted=interrupted, saved=saved, exit_code=exit_code)


def learning_rate_factor(step: int, *, steps: int, warmup_steps: int) -> float:
    """Returns the factor on the learning rate in ``step`` (from 0): a line up to 1, a cosine down to 0.1."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, steps - 1 - warmup_steps))
    return 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2


def of_report(report: Report | Measured | StagesReport) -> Record:
    """Returns what a step's record says by the model's report: bytes by place, and where the step's time went."""
    times = report.step
    return {
        "device_bytes": report.device_bytes,
        "peak_device_bytes": report.peak_device_bytes,
        "host_bytes": report.host_bytes,
        "peak_host_bytes": peak_host_bytes(),
        "disk_bytes": report.disk_bytes,
        "skipped_steps": report.skipped_steps,
        "compute_s": times.compute_s if times else 0.0,
        "fetch_wait_s": times.fetch_wait_s if times else 0.0,
        "update_wait_s": times.update_wait_s if times else 0.0,
        "disk_wait_s": times.disk_wait_s if times else 0.0,
        "outside_s": times.outside_s if times else 0.0,
        "disk_busy_s": times.disk_busy_s if times else 0.0,
        "disk_read_bytes": times.disk_read_bytes if times else 0,
        "disk_written_bytes": times.disk_written_bytes if times else 0,
    }


def peak_host_bytes() -> int:
    """Returns the peak resident memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def _build_model(settings: TrainSettings, console: Console) -> tuple[nn.Module, Weights | None]:
    """Returns the model on the meta device, and what gives it its values layer by layer."""
    wanted = settings.model
    if wanted.path is None:
        model = GPT.from_config_dict(wanted.config_dict(settings.sequence))
        console.print(
            f"model      reference GPT, {wanted.layers} layers of width {wanted.hidden}: "
            f"{format_count(model.config.parameters)} parameters",
            soft_wrap=True,
        )
        return model, model.initialize_module
    read, weights, with_weights = build_model(wanted.path)
    origin = "its weights" if with_weights else "no weights beside it, initialised anew"
    console.print(f"model      {type(read).__name__} of {wanted.path} ({origin})", soft_wrap=True)
    longest = longest_sequence_of(read)
    if longest is not None and settings.sequence > longest:
        raise ValueError(
            f"sequence must not be longer than the model takes (got sequence={settings.sequence}, the model of "
            f"{wanted.path!r} takes {longest}); pass a shorter sequence"
        )
    return read, weights


def _load_batches(settings: TrainSettings, tokenizer: Tokenizer, console: Console) -> Batches:
    data = settings.data
    documents = standard_library() if data.source is None else read_documents(data.source)
    batches = Batches(
        tokenize(documents, tokenizer),
        batch=settings.batch,
        sequence=settings.sequence,
        seed=settings.seed,
        held_out=data.held_out,
    )
    console.print(
        f"data       {data.source or 'the source of the Python standard library'}, {tokenizer.name}: "
        f"{batches.samples:,} samples of {settings.sequence:,} tokens",
        soft_wrap=True,
    )
    return batches


def _load_tokenizer(settings: TrainSettings, model: nn.Module) -> Tokenizer:
    """Returns the tokenizer that is asked for, by default the model's own. Raises ValueError where there is none."""
    wanted, path = settings.data.tokenizer, settings.model.path
    separator = model.config.separator if isinstance(model, GPT) else None
    if wanted is None and path is not None:
        folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
        if has_tokenizer(Path(folder)):
            wanted = folder
        elif not isinstance(model, GPT):
            raise ValueError(
                f"a model is trained on the ids of its own tokenizer (got none in {folder!r}); pass tokenizer, the "
                f"folder that has it, or {BYTES_NAME!r} to train on bytes"
            )
    if wanted is None or wanted == BYTES_NAME:
        if separator is not None and separator < BYTES:
            raise ValueError(
                f"bytes are {BYTES} ids, which a model must take to be trained on them (got vocabulary={separator}); "
                f"pass --vocabulary {BYTES} or more, or --tokenizer with one of as few ids"
            )
        tokenizer: Tokenizer = ByteTokenizer(BYTES if separator is None else separator)
    else:
        tokenizer = load_tokenizer(wanted, separator=separator)
    check_vocabulary(tokenizer, vocabulary_of(model))
    return tokenizer


def _scheduler(optimizer: torch.optim.Optimizer, settings: TrainSettings) -> LambdaLR:
    steps, warmup_steps = settings.optimizer.decay_steps, settings.optimizer.warmup_steps
    assert steps is not None and warmup_steps is not None
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps=steps, warmup_steps=warmup_steps))


def _save_checkpoint(checkpoints: RunCheckpoints, step: int, log: RunLog) -> None:
    begin = time.perf_counter()
    log.sync()  # first: the records of all its steps are there whenever a checkpoint is
    path = checkpoints.save(step)
    log.checkpoint({"step": step, "path": str(path), "save_s": time.perf_counter() - begin})


def _keep_store(checkpoints: RunCheckpoints, step: int, log: RunLog) -> None:
    begin = time.perf_counter()
    log.sync()
    path = checkpoints.keep(step)
    log.checkpoint({"step": step, "path": str(path), "save_s": time.perf_counter() - begin})


def _steps(
    prepared: Prepared,
    scheduler: LambdaLR,
    batches: Batches,
    settings: TrainSettings,
    timelines: list[Timeline],
    *,
    after: int,
) -> Iterator[Record]:
    """Trains from the step ``after`` on, and yields each step's record. Its time is without what is done between.

    One step's timeline is added to ``timelines``: of the third, when all has been allocated, or of the last.
    """
    prepared.model.train()
    begin = time.perf_counter()
    for step in range(after + 1, settings.steps + 1):
        lr = prepared.optimizer.param_groups[0]["lr"]
        trace = prepared.trace if step == min(after + 3, settings.steps) else None
        try:
            with nullcontext() if trace is None else trace() as timeline:
                loss = prepared.loss(batches[step - 1])
                prepared.backward(loss)
                value = loss.item()  # the forward pass is long over: nothing is waited for
                _check_loss(value, step, lr, settings.optimizer)
                prepared.step()
            timelines += [timeline] if timeline is not None else []
            scheduler.step()
            report = prepared.report()
        except (TrainingError, ParallelError):
            raise
        except NonFiniteGradientError as error:
            raise TrainingError(
                f"step {step} failed: {error.found}; lower --lr, warm up longer (--warmup), or pass --nonfinite skip "
                "to go on without such steps"
            ) from error
        except Exception as error:
            told = [str(error) or type(error).__name__, *getattr(error, "__notes__", ())]  # which Python 3.10 lacks
            raise TrainingError(f"step {step} failed: {'; '.join(told)}") from error
        now = time.perf_counter()
        yield {
            "step": step,
            "loss": value,
            "lr": lr,
            "batch": settings.batch,
            "iteration_s": now - begin,
            "tokens_per_s": settings.batch * settings.sequence / (now - begin),
            **of_report(report),
        }
        begin = time.perf_counter()


def _check_loss(loss: float, step: int, lr: float, wanted: OptimizerSettings) -> None:
    if math.isfinite(loss) or wanted.nonfinite == "skip":
        return
    clipping = "" if wanted.max_grad_norm else ", clip gradients"
    raise TrainingError(
        f"the loss must stay finite (got {loss} in step {step} at lr={lr:.3g}); lower the learning rate, warm up "
        f"longer{clipping} or check the data; the parameters are those after step {step - 1}"
    )


@torch.no_grad()
def _held_out_loss(prepared: Prepared, batches: Batches) -> float | None:
    if not batches.held_out_samples:
        return None
    prepared.model.eval()
    total = 0.0
    for batch in batches.held_out():
        total += prepared.loss(batch).item() * len(batch)
    prepared.model.train()
    return total / batches.held_out_samples
