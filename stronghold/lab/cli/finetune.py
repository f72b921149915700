"""`stronghold finetune`: its arguments, and those of a run's file, as the settings of a run."""

from __future__ import annotations

import argparse
import os
from datetime import datetime
from typing import Any

from stronghold.lab.cli.adapter_arguments import given_adapters
from stronghold.lab.cli.finetune_arguments import DEFAULTS, add_finetune_arguments
from stronghold.lab.cli.parser import Commands, Help
from stronghold.lab.finetuning.run_file import SUFFIXES, Entry, read_run_file
from stronghold.lab.finetuning.settings import CourseSettings, FinetuneSettings, RowSettings
from stronghold.lab.outputs import check_apart
from stronghold.settings import OffloadSettings

_EXAMPLES = """\
examples:
  stronghold finetune Qwen3-8B/ chats.jsonl --epochs 2 --checkpoint-every 200 --out runs/chats
      all weights, on what the assistant says in each row of messages
  stronghold finetune Qwen3-8B/ alpaca.json --lora 16 --packing --seq 2048 --held-out 200
      adapters, several rows in a sample, and the loss on 200 rows after each epoch
  stronghold finetune run.yaml --resume
      by a file with these names as keys (model: …, data: …, lora: 16); what is given beside it comes first
"""


def add_finetune(commands: Commands) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "finetune",
        help="fine-tune a transformers model on chats, prompts or text",
        usage="stronghold finetune MODEL DATA [options]\n       stronghold finetune run.yaml [options]",
        description="Fine-tunes a transformers model from a local folder with TRL's SFTTrainer, layers streamed. Before"
        "\nit starts it checks every row and shows the plan; Ctrl-C keeps a checkpoint for --resume.",
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    add_finetune_arguments(command)
    command.set_defaults(
        run=_run, actions={action.dest: action for action in command._actions if action.dest != "help"}
    )


def _run(options: argparse.Namespace) -> int:
    settings = _finetune_settings(options)
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # as torchrun sets it
    if processes > 1:
        raise ValueError(f"one process fine-tunes (got {processes} of them); start it without torchrun")
    from stronghold.lab.finetuning.run import finetune

    return finetune(settings).exit_code


def _finetune_settings(options: argparse.Namespace) -> FinetuneSettings:
    """Returns the settings that the parsed arguments mean. Raises ValueError where they contradict one another."""
    _settle(options)
    if options.data is None:
        raise ValueError(f"a run needs data (got the model {options.model!r} alone); pass a file of rows behind it")
    if options.resume and options.out is None:
        raise ValueError("--resume goes on with the run in a folder (got none); pass --out with that folder")
    if options.epochs is not None and options.steps is not None and options.epochs != DEFAULTS["epochs"]:
        raise ValueError(
            f"a run has epochs or steps (got --epochs {options.epochs:g} --steps {options.steps}); pass one"
        )
    out = f"runs/{datetime.now():%Y-%m-%d_%H-%M-%S}" if options.out is None else options.out
    device = options.device or _default_device()
    adapters = given_adapters(options)
    return FinetuneSettings(
        model=options.model,
        data=RowSettings(
            data=options.data,
            eval_data=options.eval_data,
            held_out=options.held_out,
            loss=options.loss,
            long_rows=options.long_rows,
            packing=options.packing,
        ),
        adapters=adapters,
        course=CourseSettings(
            lr=options.lr if options.lr is not None else 2e-5 if adapters is None else 2e-4,
            scheduler=options.scheduler,
            scheduler_options=options.scheduler_options,
            warmup=options.warmup,
            weight_decay=options.weight_decay,
            max_grad_norm=options.clip or None,
            states=options.states,
            update=None if options.update == "auto" else options.update,  # None: as the rest of the run has it
        ),
        offload=_offload(options, out),
        plans=options.window == "auto",
        experts_per_part=options.experts_per_part,
        device=device,
        dtype=options.dtype or ("bf16" if device == "cuda" else "fp32"),
        batch=options.batch,
        accumulate=options.accumulate,
        sequence=options.seq,
        epochs=options.epochs,
        steps=options.steps,
        seed=options.seed,
        eval_every=options.eval_every,
        out=out,
        save=options.save or os.path.join(out, "model"),
        log=options.log,
        checkpoint_every=options.checkpoint_every,
        keep_checkpoints=options.keep_checkpoints,
        resume=options.resume,
        wandb=options.wandb,
    )


def _offload(options: argparse.Namespace, out: str) -> OffloadSettings:
    plans = options.window == "auto"
    return OffloadSettings(
        window=options.window,
        store=os.path.join(out, "store") if options.store == "disk" else options.store,
        micro_batch=options.micro_batch,
        activations=options.activations if options.activations is not None else "auto" if plans else "recompute",
        resident=options.resident if options.resident is not None else "auto" if plans else 0,
        device_memory=options.device_memory,
        host_memory=options.host_memory,
        compile={"dynamic": True} if options.compile else False,  # batches are as long as their longest row
    )


def _settle(options: argparse.Namespace) -> None:
    """Gives each argument its value: the user's, the file's, or else the default."""
    actions: dict[str, argparse.Action] = options.actions
    said: dict[str, Any] = {}
    file: str | None = None
    if options.model.endswith(SUFFIXES):
        file, options.model = options.model, None
        if options.data is not None:
            raise ValueError(f"a run's file names its data (got {options.data!r} behind {file!r}); write it there")
        entries = read_run_file(file, actions)
        said = {name: _converted(actions[name], entry) for name, entry in entries.items()}
        if "model" not in said:
            raise ValueError(f"a run's file must name a model (got {file!r} without); add model: FOLDER")
    for name in actions:
        if getattr(options, name) is None:
            setattr(options, name, said.get(name, DEFAULTS.get(name)))
    check_apart([("--log", options.log)], inputs=[("run's file", file)])


def _converted(action: argparse.Action, entry: Entry) -> Any:
    """Returns the value of a run's file as the option would have it. Raises ValueError, naming file and line."""
    value, flag = entry.value, action.dest.replace("_", "-")
    if value is None:
        raise ValueError(f"{flag} must have a value (at {entry.place}: got none); give it one, or leave the key out")
    if action.nargs == 0 or (isinstance(value, bool) and action.const is not None):
        if not isinstance(value, bool):
            raise ValueError(f"{flag} is true or false (at {entry.place}: got {value!r}); write one of them")
        return value if action.nargs == 0 else action.const if value else None
    if isinstance(value, bool):
        raise ValueError(
            f"{flag} is not true or false (at {entry.place}: got {value}, which YAML also takes yes and no for); write "
            "what it is, in quotes if need be"
        )
    if isinstance(value, list):
        value = ",".join(map(str, value))
    elif isinstance(value, dict):
        value = ",".join(f"{name}={one}" for name, one in value.items())
    try:
        found = value if action.type is None else action.type(str(value))  # type: ignore[operator]
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise ValueError(f"{flag} cannot be this (at {entry.place}: got {value!r}, {error}); mend it") from error
    if action.choices is not None and found not in action.choices:
        choices = ", ".join(map(str, action.choices))
        raise ValueError(f"{flag} must be one of {choices} (at {entry.place}: got {value!r}); write one of them")
    return found


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
