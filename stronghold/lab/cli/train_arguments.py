"""The arguments of `stronghold train`, a function for each group of them in the order of --help."""

import argparse

from stronghold.distributed.partitioning import BALANCES
from stronghold.lab.cli.shared_arguments import (
    Group,
    add_activations,
    add_compile,
    add_schedule,
    add_shape,
    number_or_auto,
    numbers,
    path,
    source,
    whole,
)
from stronghold.lab.methods import METHODS

ALL = "all"
"""What --method takes besides the methods' names: each of them, one after another."""


def add_train_arguments(train: argparse.ArgumentParser) -> None:
    """Adds all that a run can be told."""
    _add_data(train.add_argument_group("data"))
    _add_model(train.add_argument_group("model"))
    _add_course(train.add_argument_group("training"))
    place = train.add_argument_group("placement")
    place.add_argument(
        "--plan",
        type=source,
        metavar="FILE",
        help="what stronghold plan -o wrote: placement, batch, tokens and types are those of the plan, and stages and "
        "replicas, for which torchrun starts as many processes",
    )
    _add_device(place)
    _add_window(place)
    _add_step(place)
    _add_budgets(place)
    _add_stages(train.add_argument_group("stages and replicas, under torchrun --nproc-per-node N"))
    _add_output(train.add_argument_group("output"))


def _add_data(data: Group) -> None:
    data.add_argument(
        "--data",
        type=source,
        metavar="PATH",
        help='text files, or .jsonl files with a "text" in each line: a file, a folder or a quoted glob (default: '
        "the source of the Python standard library)",
    )
    data.add_argument(
        "--tokenizer",
        type=source,
        metavar="PATH|bytes",
        help="a tokenizer.json, a folder with a tokenizer, or bytes (default: the model's own; of the reference GPT "
        "bytes)",
    )
    data.add_argument(
        "--held-out", type=whole, default=0, metavar="N", help="samples kept for a loss at the end (default: 0)"
    )


def _add_model(model: Group) -> None:
    model.add_argument(
        "--model",
        type=source,
        metavar="PATH",
        help="a model's folder, or a config.json to begin anew from; of transformers, or as --save writes it "
        "(default: the reference GPT, of this shape:)",
    )
    add_shape(model)


def _add_course(course: Group) -> None:
    course.add_argument("--batch", type=whole, metavar="N", help="samples in a step (default: 4)")
    course.add_argument("--seq", type=whole, metavar="N", help="tokens in a sample (default: 1024)")
    course.add_argument("--steps", type=whole, default=100, metavar="N", help="steps (default: 100); see --resume")
    course.add_argument("--lr", type=float, default=3e-4, metavar="X", help="highest learning rate (default: 3e-4)")
    course.add_argument(
        "--warmup",
        type=whole,
        metavar="N",
        help="steps until it is reached, before a cosine to a tenth (default: a tenth of all, at most 100)",
    )
    course.add_argument("--weight-decay", type=float, default=0.1, metavar="X", help="on matrices (default: 0.1)")
    course.add_argument(
        "--clip",
        type=float,
        metavar="X",
        help="largest norm of all gradients, 0 for any (default: 1; with updates in the backward pass 0)",
    )
    course.add_argument(
        "--nonfinite",
        choices=("raise", "skip"),
        default="raise",
        help="end at a gradient of NaN or infinity, or skip and count its step (default: raise)",
    )
    course.add_argument("--seed", type=whole, default=0, metavar="N", help="of weights and order (default: 0)")


def _add_device(place: Group) -> None:
    place.add_argument(
        "--method",
        choices=(*METHODS, ALL),
        default="stronghold",
        metavar="NAME",
        help=f"what trains: {', '.join(METHODS)}, or all of them in turn (default: stronghold)",
    )
    place.add_argument("--device", help="cpu, cuda, cuda:N or an accelerator that torch sees (default: cuda, else cpu)")
    place.add_argument(
        "--device-limit",
        metavar="SIZE",
        help="what the process may take of a GPU, whatever trains: more is out of memory (default: all of it)",
    )
    place.add_argument("--dtype", choices=("fp32", "bf16"), help="compute type; masters are fp32 (default: fp32)")


def _add_window(place: Group) -> None:
    place.add_argument(
        "--window",
        type=number_or_auto,
        metavar="N|auto",
        help="layers on the device at a time (default: auto)",
    )
    place.add_argument(
        "--resident",
        type=number_or_auto,
        metavar="N|auto",
        help="layers that stay on the device and are updated there; auto fills --device-memory (default: 0)",
    )
    place.add_argument(
        "--store",
        type=path,
        metavar="ram|disk|DIR",
        help="where the other layers, and all states, are: in memory, in OUT/store, or in that folder, which "
        "keeps the run of one process when it ends, for --resume (default: ram)",
    )


def _add_step(place: Group) -> None:
    place.add_argument(
        "--micro-batch", type=whole, metavar="N", help="samples a layer computes at a time (default: the batch)"
    )
    add_activations(place, "recompute")
    add_compile(place)
    place.add_argument(
        "--update",
        choices=("deferred", "in_backward"),
        help="update layers behind the step, or as soon as each has its gradient (default: deferred; stronghold, also "
        "among all, with --store on disk and without --clip: in_backward)",
    )
    place.add_argument(
        "--states",
        choices=("fp32", "8bit"),
        help="AdamW's moments: 8 bytes per parameter, or 2 (default: fp32)",
    )


def _add_budgets(place: Group) -> None:
    place.add_argument("--device-memory", metavar="SIZE", help="budget, such as 24GiB (default: what is free)")
    place.add_argument("--host-memory", metavar="SIZE", help="budget, such as 64GiB (default: none)")


def _add_stages(stages: Group) -> None:
    stages.add_argument(
        "--stages", type=whole, metavar="N", help="parts of the model, one or more a process (default: 1)"
    )
    stages.add_argument(
        "--replicas",
        type=whole,
        metavar="N",
        help="that train the whole model, each with a part of the batch (default: 1)",
    )
    stages.add_argument(
        "--micro-batches",
        type=whole,
        metavar="N",
        help="parts of the batch that go through the stages one behind the other (default: as many as divide it, up to "
        "four for each stage; with --resume those that the run began with)",
    )
    add_schedule(stages)
    stages.add_argument(
        "--balance",
        type=_balance,
        metavar="NAME|N,N,…",
        help=f"what stages have in equal parts, {', '.join(BALANCES)}, the first two measured; or the layers of each; "
        "or the file of a partition (default: layers)",
    )


def _add_output(output: Group) -> None:
    output.add_argument(
        "--out",
        type=path,
        metavar="DIR",
        help="the run's folder: log.jsonl and TensorBoard events (default: runs/ and the time)",
    )
    output.add_argument(
        "--checkpoint-every",
        type=whole,
        metavar="N",
        help="save all that the run needs to go on, every N steps and at its end, in OUT/checkpoints (default: never)",
    )
    output.add_argument(
        "--keep-checkpoints", type=whole, default=2, metavar="N", help="how many of them stay (default: 2)"
    )
    output.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest intact checkpoint in OUT, or the run that --store DIR has kept, to the bit as if "
        "never stopped; begin if there is none yet. --steps may be others: warm-up and cosine stay those of the steps "
        "that the run began with, and further ones have a tenth of --lr",
    )
    output.add_argument(
        "--save", type=path, metavar="DIR", help="save the model there; on Ctrl-C without it: OUT/model"
    )
    output.add_argument("--log", type=path, metavar="FILE", help="also write a log to read")
    output.add_argument("--record", type=path, metavar="FILE", help="append the run's summary there, as a JSON line")


def _balance(text: str) -> str | tuple[int, ...]:
    # What has a comma is meant as numbers; a file with one in its name is told by its folder, ./a,b.json.
    if text.isdecimal() or ("," in text and "/" not in text):
        return numbers(text, f"{', '.join(BALANCES)}, the file of a partition, or ")
    return source(text)
