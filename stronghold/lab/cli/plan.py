"""`stronghold plan`: what fits a machine, how fast, and with which settings."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from stronghold.lab.cli.adapter_arguments import add_adapters, given_adapters
from stronghold.lab.cli.parser import Commands, Help
from stronghold.lab.cli.profiled import BATCH, add_profile, check_no_profile, run_profiled
from stronghold.lab.cli.shared_arguments import (
    SHAPE,
    Group,
    add_activations,
    add_shape,
    given_shape,
    number_or_auto,
    path,
    source,
    whole,
)
from stronghold.lab.settings import ModelSettings

if TYPE_CHECKING:
    from stronghold.planner.machine_file import MachineFile

_EXAMPLES = """\
examples:
  stronghold plan -l 32 --hidden 4096 --heads 32 --batch 8 --dtype bf16 -o plan.json
      a 6.7 billion parameter GPT on this machine
  stronghold plan Qwen3-8B/ --batch 16 --seq 2048 --dtype bf16 --disk /mnt/nvme --host-memory 48GiB
      a transformers model by its config.json, with layers on disk if need be
  stronghold plan Qwen3-8B/ --machine workstation.json --device-memory 24GiB --picture plan.html
      the same for another machine, on which stronghold probe has run, with the timeline of a step
  stronghold plan Llama-70B/ --lora --quantize nf4 --dtype bf16 --card 4090 --host-memory 64GiB
      adapters over a base in four bits, on a card that one does not have yet
  stronghold plan -l 32 --hidden 4096 --heads 32 --batch 32 --dtype bf16 --processes 4 -o plan.json
      the same for four processes, in stages or replicas, each with a GPU of its own
  stronghold plan gpt_1_3B -l 24 --profile profiled/ --devices-per-node 4 --device-memory 28GiB
      stages, tensor-parallel degrees and recomputed operators from a profile in Aceso's format
"""


def add_plan(commands: Commands) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "plan",
        help="say what fits, how fast, with which settings",
        usage="stronghold plan [MODEL] [options]",
        description="Searches the settings under which a step is the shortest, and says what it takes, before "
        "anything is\nloaded. Without --machine it is for this one, which is measured first if it has not been.",
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    command.set_defaults(run=_run)
    model = command.add_argument_group("model")
    model.add_argument(
        "model",
        nargs="?",
        type=source,
        metavar="MODEL",
        help="a model's folder, or its config.json (default: the reference GPT, of this shape:)",
    )
    add_shape(model)
    add_adapters(command.add_argument_group("adapters of MODEL (default: all weights are trained)"))
    step = command.add_argument_group("step")
    step.add_argument("--batch", type=whole, metavar="N", help=f"samples (default: {BATCH})")
    step.add_argument("--seq", type=whole, metavar="N", help="tokens in a sample (default: 1024)")
    step.add_argument(
        "--accumulate", type=whole, metavar="N", help="batches whose gradients a step adds up (default: 1)"
    )
    step.add_argument("--dtype", choices=("fp32", "bf16"), help="compute type (default: fp32)")
    step.add_argument("--tokens", type=_tokens, metavar="N", help="say how long so many take (default: 1e9)")
    _add_machine(command.add_argument_group("machine"))
    _add_settings(command.add_argument_group("settings that are set, and not searched"))
    add_profile(command.add_argument_group("somebody else's profile"))
    output = command.add_argument_group("output")
    output.add_argument("-o", "--output", type=path, metavar="FILE", help="write the plan as JSON, for train --plan")
    output.add_argument("--picture", type=path, metavar="FILE", help="write a page (HTML) with the timeline of a step")


def _add_machine(machine: Group) -> None:
    machine.add_argument("--machine", type=source, metavar="FILE", help="what stronghold probe -o wrote")
    machine.add_argument(
        "--card",
        metavar="NAME",
        help="by its maker's numbers, with --host-memory beside it: RTX 3090, 4090 or 5090, A100, H100, H200",
    )
    machine.add_argument(
        "--device", metavar="NAME", help="of this machine: cpu, cuda … (default: a GPU if there is one)"
    )
    machine.add_argument(
        "--device-memory", metavar="SIZE", help="what may be taken, activations too (default: nearly all)"
    )
    machine.add_argument("--host-memory", metavar="SIZE", help="the same of the process (default: nine tenths)")
    machine.add_argument(
        "--cores", type=whole, metavar="N", help="of the host, in place of those measured: time is in proportion"
    )
    machine.add_argument(
        "--disk", type=path, action="append", metavar="DIR", help="where layers may be as well; several add up"
    )
    machine.add_argument(
        "--processes",
        type=whole,
        metavar="N",
        help="that train it together, as stages, replicas or both; --device-memory and --host-memory are of each "
        "(default: 1)",
    )


def _add_settings(settings: Group) -> None:
    settings.add_argument("--window", type=whole, metavar="N", help="layers on the device at a time")
    settings.add_argument("--resident", type=whole, metavar="N", help="layers that stay there")
    settings.add_argument("--micro-batch", type=whole, metavar="N", help="samples a layer computes at a time")
    settings.add_argument(
        "--experts-per-part",
        type=number_or_auto,
        metavar="K|auto",
        help="experts of a mixture that move together (default: auto, all of a layer or, in one process, as fits)",
    )
    add_activations(settings, "as many as pay")
    settings.add_argument("--update", choices=("deferred", "in_backward"), help="when layers are updated")
    settings.add_argument(
        "--optimizer",
        choices=("adamw", "muon"),
        help="stronghold.AdamW, or stronghold.Muon for the layers' matrices (default: adamw)",
    )
    settings.add_argument(
        "--states",
        choices=("fp32", "8bit", "any"),
        help="AdamW's moments; 8bit ones change numbers (default: fp32)",
    )


def _run(options: argparse.Namespace) -> int:
    if options.profile is not None:
        return run_profiled(options)
    check_no_profile(options)
    from stronghold.lab.cli.probe import machine_of
    from stronghold.lab.outputs import check_apart, plain_console
    from stronghold.lab.planning import PlanSettings, plan_run

    shape = given_shape(options)
    if options.model is not None and shape:
        raise ValueError(
            f"a model from files has its own shape (got {options.model} with "
            f"{', '.join('--' + name for name in shape)}); leave out one or the other"
        )
    parts = options.experts_per_part
    if parts is None and options.processes in (None, 1):
        parts = "auto"
    settings = PlanSettings(
        model=ModelSettings(path=options.model, **{**SHAPE, **shape}),
        adapters=given_adapters(options),
        batch=BATCH if options.batch is None else options.batch,
        sequence=1024 if options.seq is None else options.seq,
        dtype=options.dtype or "fp32",
        store=options.disk or "ram",
        states=("fp32", "8bit") if options.states == "any" else (options.states or "fp32",),
        update=options.update,
        optimizer=options.optimizer or "adamw",
        activations=options.activations,
        micro_batch="auto" if options.micro_batch is None else options.micro_batch,
        experts_per_part=parts,
        window=options.window,
        resident=options.resident,
        device_memory=options.device_memory,
        host_memory=options.host_memory,
        cores=options.cores,
        processes=1 if options.processes is None else options.processes,
        accumulate=1 if options.accumulate is None else options.accumulate,
        tokens=10**9 if options.tokens is None else options.tokens,
        output=options.output,
        picture=options.picture,
    )
    outputs = [("--output", options.output), ("--picture", options.picture)]
    check_apart(outputs, inputs=[("--machine", options.machine)])
    # In a model's folder, too, an earlier plan is written anew.
    check_apart([one for one in outputs if not _is_plan(one[1])], inputs=[("MODEL", options.model)])
    if options.card is None:
        machine = machine_of(options.machine, options.device, options.disk or ())
    else:
        machine = _carded(options)
    plan_run(settings, machine, plain_console())
    return 0


def _carded(options: argparse.Namespace) -> MachineFile:
    from stronghold.planner.cards import card_named, machine_of_card
    from stronghold.units import parse_bytes

    card = card_named(options.card)
    given = [name for name in ("machine", "device", "cores") if getattr(options, name) is not None]
    if given:
        raise ValueError(
            f"--card is for a machine that nobody has measured (got --card {options.card} with "
            f"{', '.join('--' + name for name in given)}); leave out one or the other"
        )
    if options.host_memory is None:
        raise ValueError(
            f"a card does not tell the memory beside it (got --card {options.card}); pass --host-memory too, such as "
            "--host-memory 64GiB"
        )
    directories = [os.path.realpath(disk) for disk in options.disk or ()]
    return machine_of_card(card, parse_bytes(options.host_memory), directories)


def _is_plan(file: str | None) -> bool:
    """Whether ``file`` is what this command has written: a plan, or its page."""
    from stronghold.lab.page.plan import is_plan_page
    from stronghold.planner.training_plan import TrainingPlan

    if file is None or not os.path.isfile(file):
        return False
    try:
        TrainingPlan.read(file)
    except (OSError, ValueError):
        return is_plan_page(file)
    return True


def _tokens(text: str) -> int:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1 <= number < 1e18:
        raise argparse.ArgumentTypeError(
            f"must be a number of tokens from 1 to below 1e18, such as 1e9 (got {text[:30]!r})"
        )
    return int(number)
