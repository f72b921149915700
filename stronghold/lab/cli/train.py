"""`stronghold train`: its arguments as the settings of a run."""

import argparse
import os
from datetime import datetime
from typing import Any

from stronghold.lab.cli.parser import Commands, Help
from stronghold.lab.cli.planned import settle
from stronghold.lab.cli.shared_arguments import SHAPE, given_shape
from stronghold.lab.cli.train_arguments import ALL, add_train_arguments
from stronghold.lab.settings import DataSettings, ModelSettings, OptimizerSettings, ParallelSettings, TrainSettings
from stronghold.settings import OffloadSettings

_EXAMPLES = """\
examples:
  stronghold train -l 8 --hidden 256 --seq 256 --window 2 --steps 60
      a small reference GPT on the source of the Python standard library
  stronghold train --data 'books/**/*.txt' --device cuda --dtype bf16 -l 100 --window 8 --out runs/books
      a 5 billion parameter GPT on text files, on a GPU
  stronghold train --plan plan.json -l 32 --hidden 4096 --heads 32
      by what stronghold plan -o plan.json has found for that model
  stronghold train --model Qwen3-8B/ --data texts.jsonl --save Qwen3-8B-tuned/
      fine-tunes a transformers model from a local folder, with its tokenizer
"""


def add_train(commands: Commands) -> None:
    """Adds the command."""
    train = commands.add_parser(
        "train",
        help="train a model on text",
        usage="stronghold train [options]",
        description="Trains the reference GPT, or a transformers model from local files, on text.",
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    train.set_defaults(run=_run)
    add_train_arguments(train)


def _train_settings(options: argparse.Namespace) -> TrainSettings:
    """Returns the settings that the parsed arguments mean. Raises ValueError where they contradict one another."""
    settle(options)
    shape = _shape(options)
    if options.resume and options.out is None:
        raise ValueError("--resume goes on with the run in a folder (got none); pass --out with that folder")
    out = f"runs/{datetime.now():%Y-%m-%d_%H-%M-%S}" if options.out is None else options.out
    settings = TrainSettings(
        method=options.method,
        model=ModelSettings(path=options.model, **shape),
        data=DataSettings(source=options.data, tokenizer=options.tokenizer, held_out=options.held_out),
        optimizer=_optimizer(options),
        offload=_offload(options, out),
        parallel=ParallelSettings(
            stages=options.stages,
            replicas=options.replicas,
            micro_batches=options.micro_batches,
            schedule=options.schedule,
            balance=options.balance,
        ),
        device=_default_device() if options.device is None else options.device,
        device_limit=options.device_limit,
        dtype=options.dtype,
        batch=options.batch,
        sequence=options.seq,
        steps=options.steps,
        seed=options.seed,
        out=out,
        save=options.save,
        log=options.log,
        record=options.record,
        checkpoint_every=options.checkpoint_every,
        keep_checkpoints=options.keep_checkpoints,
        resume=options.resume,
        # Of several processes no store is a checkpoint: each has only its own part in it.
        keep_store=options.store not in ("ram", "disk") and options.stages == options.replicas == 1,
    )
    return settings if settings.resume else settings.begun()


def _run(options: argparse.Namespace) -> int:
    settings = _train_settings(options)
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # as torchrun sets it
    if options.plan is not None and options.plan.processes != processes:
        started = f"torchrun --nproc-per-node {options.plan.processes} -m stronghold train --plan"
        if options.plan.processes == 1:
            started = "stronghold train --plan, without torchrun"
        raise ValueError(
            f"a plan is followed by as many processes as it is for (got {processes} for one of "
            f"{options.plan.processes}); start it with {started}, or plan for them: stronghold plan --processes "
            f"{processes}"
        )
    if settings.parallel.alone and processes > 1:
        raise ValueError(
            f"a model in one stage and one replica is trained by one process (got {processes} of them); pass --stages "
            f"{processes} or --replicas {processes}, or start it without torchrun"
        )
    if settings.method == ALL:
        from stronghold.lab.comparison import compare

        compare(settings, options.arguments)
        return 0
    from stronghold.lab.training import train

    return train(settings, plan=options.plan).exit_code


def _shape(options: argparse.Namespace) -> dict[str, Any]:
    given = given_shape(options)
    if options.model is not None and given:
        raise ValueError(
            f"a model from files has its own shape (got --model with {', '.join('--' + name for name in given)}); "
            "leave out one or the other"
        )
    return SHAPE | given


def _optimizer(options: argparse.Namespace) -> OptimizerSettings:
    update, clip = options.update, options.clip
    if update is None:  # on disk, gradients of the whole model in memory are what one wants to do without
        hides = options.method in ("stronghold", ALL) and options.store != "ram" and not clip
        update = "in_backward" if hides else "deferred"
    if clip is None:
        clip = 0.0 if update == "in_backward" else 1.0
    return OptimizerSettings(
        lr=options.lr,
        warmup_steps=options.warmup,
        weight_decay=options.weight_decay,
        max_grad_norm=clip or None,
        states=options.states,
        update=update,
        nonfinite=options.nonfinite,
    )


def _offload(options: argparse.Namespace, out: str) -> OffloadSettings:
    return OffloadSettings(
        window=options.window,
        store=os.path.join(out, "store") if options.store == "disk" else options.store,
        micro_batch=options.micro_batch,
        activations=options.activations,
        resident=options.resident,
        device_memory=options.device_memory,
        host_memory=options.host_memory,
        compile=bool(options.compile),
    )


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
