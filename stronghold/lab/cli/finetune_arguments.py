"""The arguments of `stronghold finetune`, a function for each group of them in the order of --help.

Each is None where it is not given: then the run's file says, or DEFAULTS.
"""

from __future__ import annotations

import argparse
from typing import Any

from stronghold.lab.cli.adapter_arguments import ADAPTER_DEFAULTS, add_adapters
from stronghold.lab.cli.shared_arguments import Group, add_activations, add_compile, number_or_auto, path, source, whole
from stronghold.lab.finetuning.encoded import LONG_ROWS
from stronghold.lab.finetuning.settings import DTYPES, SCHEDULERS
from stronghold.lab.finetuning.tokens import LOSSES

DEFAULTS: dict[str, Any] = {
    "seq": 1024,
    "loss": "completions",
    "long_rows": "refuse",
    "packing": False,
    **ADAPTER_DEFAULTS,
    "epochs": 1.0,
    "batch": 8,
    "accumulate": 1,
    "scheduler": "linear",
    "scheduler_options": {},
    "warmup": 0.0,
    "weight_decay": 0.0,
    "clip": 1.0,
    "seed": 0,
    "held_out": 0,
    "window": "auto",
    "experts_per_part": "auto",
    "compile": False,
    "store": "ram",
    "states": "fp32",
    "keep_checkpoints": 2,
    "resume": False,
}
"""What an argument is that neither the user nor the run's file gives; of others it is None."""


def add_finetune_arguments(command: argparse.ArgumentParser) -> None:
    """Adds all that a run can be told."""
    what = command.add_argument_group("what")
    what.add_argument("model", type=source, metavar="MODEL", help="a transformers model's folder, or a run's YAML file")
    what.add_argument(
        "data",
        nargs="?",
        type=source,
        metavar="DATA",
        help="rows in .jsonl, .json or .parquet: a file, a folder or a quoted glob; messages, prompt and completion, "
        "Alpaca, ShareGPT or text",
    )
    _add_data(command.add_argument_group("data"))
    add_adapters(command.add_argument_group("adapters (default: all weights are trained)"))
    _add_course(command.add_argument_group("training"))
    _add_evaluation(command.add_argument_group("evaluation"))
    _add_placement(command.add_argument_group("placement"))
    _add_output(command.add_argument_group("output"))


def _add_data(data: Group) -> None:
    data.add_argument("--seq", type=whole, metavar="N", help="most tokens in a row, or a packed sample (default: 1024)")
    data.add_argument(
        "--loss", choices=LOSSES, help="learn what the assistant says, or all tokens (default: completions)"
    )
    data.add_argument(
        "--long-rows",
        choices=LONG_ROWS,
        help="rows longer than --seq are an error, cut, or left out (default: refuse)",
    )
    data.add_argument(
        "--packing",
        action="store_true",
        default=None,
        help="put several rows into one sample of --seq tokens; none sees another",
    )


def _add_course(course: Group) -> None:
    course.add_argument("--epochs", type=float, metavar="X", help="passes over the data (default: 1)")
    course.add_argument("--steps", type=whole, metavar="N", help="steps, in place of --epochs")
    course.add_argument("--batch", type=whole, metavar="N", help="samples computed together (default: 8)")
    course.add_argument("--accumulate", type=whole, metavar="N", help="batches in a step (default: 1)")
    course.add_argument("--lr", type=float, metavar="X", help="highest learning rate (default: 2e-5; of adapters 2e-4)")
    course.add_argument(
        "--scheduler", choices=SCHEDULERS, metavar="NAME", help=f"{', '.join(SCHEDULERS)} (default: linear)"
    )
    course.add_argument(
        "--scheduler-options", type=_options, metavar="K=V,…", help="its own, such as min_lr=1e-6 of cosine_with_min_lr"
    )
    course.add_argument("--warmup", type=float, metavar="X", help="steps until --lr, or a share below 1 (default: 0)")
    course.add_argument("--weight-decay", type=float, metavar="X", help="but of biases and norms (default: 0)")
    course.add_argument("--clip", type=float, metavar="X", help="largest norm of all gradients, 0 for any (default: 1)")
    course.add_argument("--seed", type=whole, metavar="N", help="of adapters, dropout and order (default: 0)")


def _add_evaluation(evaluation: Group) -> None:
    evaluation.add_argument("--eval-data", type=source, metavar="DATA", help="rows to evaluate on while training")
    evaluation.add_argument("--held-out", type=whole, metavar="N", help="or N rows of DATA, evenly spread (default: 0)")
    evaluation.add_argument("--eval-every", type=whole, metavar="N", help="steps (default: those of an epoch)")


def _add_placement(place: Group) -> None:
    place.add_argument(
        "--device", choices=("cpu", "cuda"), help="where layers compute (default: cuda where there is one)"
    )
    place.add_argument(
        "--dtype",
        choices=DTYPES,
        help="compute type; masters and adapters are fp32 (default: fp32; on cuda bf16)",
    )
    place.add_argument(
        "--window",
        type=number_or_auto,
        metavar="N|auto",
        help="layers on the device at a time; auto: the planner chooses this, and what is not given below (default)",
    )
    place.add_argument(
        "--resident", type=number_or_auto, metavar="N|auto", help="layers that stay there (default: planned, or 0)"
    )
    add_activations(place, "planned, or recompute")
    place.add_argument(
        "--micro-batch",
        type=whole,
        metavar="N",
        help="samples a layer computes at a time (default: planned, or all)",
    )
    add_compile(place)
    place.add_argument(
        "--experts-per-part",
        type=number_or_auto,
        metavar="K|auto",
        help="experts of a mixture that move together (default: auto, all of a layer or as many as fit)",
    )
    place.add_argument(
        "--store",
        type=path,
        metavar="ram|disk|DIR",
        help="where the other layers, and all states, are: in memory, in OUT/store, or in that folder (default: ram)",
    )
    place.add_argument(
        "--update",
        choices=("deferred", "in_backward", "auto"),
        help="update layers behind the step, or as each has its gradient, which clips and accumulates nothing "
        "(default: deferred; with --clip 0 auto)",
    )
    place.add_argument(
        "--states", choices=("fp32", "8bit"), help="AdamW's moments: 8 bytes per parameter, or 2 (default: fp32)"
    )
    place.add_argument("--device-memory", metavar="SIZE", help="budget, such as 24GiB (default: what is free)")
    place.add_argument("--host-memory", metavar="SIZE", help="budget, such as 64GiB (default: none)")


def _add_output(output: Group) -> None:
    output.add_argument(
        "--out",
        type=path,
        metavar="DIR",
        help="the run's folder: log.jsonl, TensorBoard events, checkpoints (default: runs/ and the time)",
    )
    output.add_argument(
        "--save",
        type=path,
        metavar="DIR",
        help="where what is trained goes, with the tokenizer (default: OUT/model)",
    )
    output.add_argument(
        "--checkpoint-every",
        type=whole,
        metavar="N",
        help="steps, and at the end; each is a model or adapters to load, too (default: on Ctrl-C alone)",
    )
    output.add_argument("--keep-checkpoints", type=whole, metavar="N", help="how many of them stay (default: 2)")
    output.add_argument(
        "--resume",
        action="store_true",
        default=None,
        help="go on from the newest whole checkpoint in OUT, to the bit as if never stopped; begin where there is none",
    )
    output.add_argument("--log", type=path, metavar="FILE", help="also write a log to read")
    output.add_argument("--wandb", metavar="PROJECT", help="log to Weights & Biases, where wandb is installed")


def _options(text: str) -> dict[str, float | str]:
    found = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            raise argparse.ArgumentTypeError(f"must be NAME=VALUE with commas between (got {text[:60]!r})")
        found[name] = _number(value)
    return found


def _number(text: str) -> float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
