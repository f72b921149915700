"""The arguments that `stronghold train` and `stronghold partition` have in common."""

import argparse
from typing import Any

from stronghold.plan.pipeline import SCHEDULES

SHAPE = {"layers": 16, "hidden": 2048, "heads": 16, "vocabulary": 51200, "dropout": 0.0}
"""The reference GPT's, unless told."""

Group = argparse._ArgumentGroup  # what add_argument_group returns has no public name


def add_shape(model: Group) -> None:
    """Adds the shape of the reference GPT."""
    model.add_argument("-l", "--layers", type=int, metavar="N", help="layers (default: 16)")
    model.add_argument("--hidden", type=int, metavar="N", help="width of a layer (default: 2048)")
    model.add_argument("--heads", type=int, metavar="N", help="attention heads (default: 16)")
    model.add_argument("--vocabulary", type=int, metavar="N", help="token ids (default: 51200)")
    model.add_argument("--dropout", type=float, metavar="P", help="dropout probability (default: 0)")


def given_shape(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what the arguments say of the reference GPT's shape."""
    return {name: getattr(options, name) for name in SHAPE if getattr(options, name) is not None}


def add_schedule(stages: Group) -> None:
    """Adds the order of the passes of stages."""
    stages.add_argument(
        "--schedule",
        choices=SCHEDULES,
        metavar="NAME",
        help=f"{', '.join(SCHEDULES)} (default: 1F1B with one stage on each process, else interleaved)",
    )


def numbers(text: str, others: str = "") -> tuple[int, ...]:
    """Returns the whole numbers of ``text``, which has commas between them.

    Raises ArgumentTypeError, which names ``others``, what else the argument takes, where it is no such text.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {others}numbers such as 26,23 (got {text!r})") from None
