"""`stronghold partition`: a model's layers measured, and cut into stages."""

import argparse

from stronghold.lab.cli.parser import Commands, Help
from stronghold.lab.cli.shared_arguments import (
    SHAPE,
    Group,
    add_schedule,
    add_shape,
    given_shape,
    numbers,
    path,
    source,
    whole,
)
from stronghold.lab.settings import ModelSettings

GPT = "gpt"
"""What MODEL is for the reference GPT."""

_EXAMPLES = """\
examples:
  stronghold partition -l 24 --hidden 1024 --stages 4 -o partition.json
      the reference GPT over four processes, each stage as fast as can be
  stronghold partition -l 24 --hidden 1024 --stages 4 --memory 8GiB --device cuda
      the same, each stage recomputing as few layers as fit 8 GiB
  stronghold partition -l 96 --hidden 4096 --stages 4 --window 4 --memory 24GiB --device cuda
      stages that are larger than the device, whose layers pass through a window
  stronghold partition shop.vision:resnet --input 3,224,224 --file partition.json --micro-batches 16
      how good a partition of one's own model is
"""


def add_partition(commands: Commands) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "partition",
        help="cut a model into stages of equal time",
        usage="stronghold partition [MODEL] --stages N [options]",
        description="Measures each layer of a model, forward and backward, and prints the partition into stages whose\n"
        "slowest stage is the fastest there is. A model need not fit the memory: one layer at a time is in it.",
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    command.set_defaults(run=_run)
    model = command.add_argument_group("model")
    model.add_argument(
        "model",
        nargs="?",
        default=GPT,
        metavar="MODEL",
        help=f"{GPT}, the reference GPT of the shape below (default), or module:attribute: an nn.Sequential, or a "
        "function that returns one",
    )
    add_shape(model)
    model.add_argument(
        "--input", type=numbers, metavar="N,N,…", help="shape of a sample of module:attribute, such as 3,224,224"
    )
    _add_stages(command.add_argument_group("stages"))
    _add_measuring(command.add_argument_group("what is measured"))
    command.add_argument_group("output").add_argument(
        "-o",
        "--output",
        type=path,
        metavar="FILE",
        help='write {"partition": [26, 23], "recompute_ratio": [1, 1]} there',
    )


def _add_stages(stages: Group) -> None:
    stages.add_argument("--stages", type=whole, metavar="N", help="parts to cut the model into")
    stages.add_argument(
        "--processes", type=whole, metavar="N", help="that compute them, one stage or several each (default: one each)"
    )
    add_schedule(stages)
    stages.add_argument(
        "--balance",
        type=_balance,
        metavar="time|memory|N,N,…",
        help="the least time of the slowest stage, the least bytes of the fullest, or so many layers (default: time)",
    )
    stages.add_argument(
        "--file", type=source, metavar="FILE", help="judge the partition in this file, in place of --balance"
    )
    stages.add_argument(
        "--memory",
        metavar="SIZE",
        help="what a stage may take on the device: weights, or its window, and activations (default: any)",
    )
    stages.add_argument(
        "--activations",
        choices=("recompute", "keep"),
        help="of all layers (default: each stage recomputes as few as fit --memory)",
    )
    stages.add_argument(
        "--window",
        type=whole,
        metavar="N",
        help="each stage's layers pass through a window of so many (default: all are on the device)",
    )
    stages.add_argument(
        "--machine",
        type=source,
        metavar="FILE",
        help="what stronghold probe wrote of the machine that all processes are on, for fetches, updates and "
        "messages to count (default: what is kept of this one)",
    )


def _add_measuring(measured: Group) -> None:
    measured.add_argument(
        "--micro-batches",
        type=whole,
        metavar="N",
        help="parts of the batch (default: as many as divide it, up to four for each stage)",
    )
    measured.add_argument(
        "--batch", type=whole, metavar="N", help="samples in a step (default: one for each micro-batch)"
    )
    measured.add_argument(
        "--seq",
        "--sequence",
        type=whole,
        default=1024,
        metavar="N",
        help="the GPT's tokens in a sample (default: 1024)",
    )
    measured.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="compute type (default: fp32)")
    measured.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where there is one, else cpu)")


def _run(options: argparse.Namespace) -> int:
    import torch

    from stronghold.lab.cli.stages import PartitionSettings, partition_model
    from stronghold.lab.outputs import plain_console

    shape = given_shape(options)
    if options.model != GPT and shape:
        raise ValueError(
            f"a model that is named has its own shape (got {options.model} with "
            f"{', '.join('--' + name for name in shape)}); leave out one or the other"
        )
    settings = PartitionSettings(
        model=None if options.model == GPT else options.model,
        shape=ModelSettings(**{**SHAPE, **shape}),
        sample=options.input,
        stages=options.stages,
        processes=options.processes,
        micro_batches=options.micro_batches,
        schedule=options.schedule,
        balance=options.balance,
        file=options.file,
        activations=options.activations,
        memory=options.memory,
        window=options.window,
        machine=options.machine,
        batch=options.batch,
        sequence=options.seq,
        dtype=options.dtype,
        device=("cuda" if torch.cuda.is_available() else "cpu") if options.device is None else options.device,
        output=options.output,
    )
    partition_model(settings, plain_console())
    return 0


def _balance(text: str) -> str | tuple[int, ...]:
    return text if text in ("time", "memory") else numbers(text, "time, memory, or ")
