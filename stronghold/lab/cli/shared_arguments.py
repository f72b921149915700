"""What arguments of several commands have in common: the shape of a model, and how numbers and paths are read."""

import argparse
import errno
import os
from pathlib import Path
from typing import Any

from stronghold.planner.pipeline_order import SCHEDULES
from stronghold.settings import ACTIVATIONS

SHAPE = {"layers": 16, "hidden": 2048, "heads": 16, "vocabulary": 51200, "dropout": 0.0}
"""The reference GPT's, unless told."""

_LARGEST = 2**63 - 1
"""What 64 bits hold: the largest number that files and libraries take."""

Group = argparse._ArgumentGroup  # what add_argument_group returns has no public name


def add_shape(model: Group) -> None:
    """Adds the shape of the reference GPT."""
    model.add_argument("-l", "--layers", type=whole, metavar="N", help="layers (default: 16)")
    model.add_argument("--hidden", type=whole, metavar="N", help="width of a layer (default: 2048)")
    model.add_argument("--heads", type=whole, metavar="N", help="attention heads (default: 16)")
    model.add_argument("--vocabulary", type=whole, metavar="N", help="token ids (default: 51200)")
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


def add_compile(place: Group) -> None:
    """Adds whether layers are compiled."""
    place.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compile the layers, one graph for each class of them; what cannot be compiled runs eagerly, which a "
        "warning says (default: no)",
    )


def add_activations(place: Group, default: str) -> None:
    """Adds what the backward pass finds of a layer."""
    place.add_argument(
        "--activations",
        type=word_or_number,
        metavar="{" + ",".join(ACTIVATIONS) + ",N}",
        help="what the backward pass needs: computed again, kept, or computed again from inputs kept in host memory or "
        f"on the store's disk; a number: so many layers, the last ones, keep it (default: {default})",
    )


def word_or_number(text: str) -> int | str:
    """Returns one of ``ACTIVATIONS``, or a number of layers. Raises ArgumentTypeError for what is neither."""
    if text in ACTIVATIONS:
        return text
    try:
        return whole(text)
    except argparse.ArgumentTypeError:
        words = ", ".join(ACTIVATIONS)
        raise argparse.ArgumentTypeError(f"must be {words} or a number of layers (got {_shown(text)})") from None


def whole(text: str) -> int:
    """Returns the whole number that ``text`` is.

    Raises ArgumentTypeError for what is none, and for one that 64 bits do not hold.
    """
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number (got {_shown(text)})") from None
    if abs(number) > _LARGEST:
        raise argparse.ArgumentTypeError(f"must be a whole number of at most {_LARGEST} (got {_shown(text)})")
    return number


def number_or_auto(text: str) -> int | str:
    """Returns the whole number that ``text`` is, or ``"auto"``. Raises ArgumentTypeError for what is neither."""
    if text == "auto":
        return text
    try:
        return whole(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"must be a whole number or auto (got {_shown(text)})") from None


def numbers(text: str, others: str = "") -> tuple[int, ...]:
    """Returns the whole numbers of ``text``, which has commas between them.

    Raises ArgumentTypeError, which names ``others``, what else the argument takes, where it is no such text.
    """
    try:
        return tuple(whole(part) for part in text.split(","))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"must be {others}numbers such as 26,23 (got {_shown(text)})") from None


def path(text: str) -> str:
    """Returns ``text``, which names a file or a folder, there or not.

    Raises ArgumentTypeError for what no file is called: nothing, or what is too long.
    """
    try:
        os.stat(text or "\0")
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a path (got {text!r})") from None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise argparse.ArgumentTypeError(f"must be a path (got {_shown(text)}: {error.strerror})") from None
    return text


def source(text: str) -> str:
    """Returns ``text``, which names a file or a folder to read.

    Raises ArgumentTypeError for what :func:`path` refuses, and for a device, which may never end.
    """
    device = os.path.exists(path(text)) and not (os.path.isdir(text) or os.path.isfile(text) or Path(text).is_fifo())
    if device:
        raise argparse.ArgumentTypeError(f"must be a file or a folder (got the device {text!r})")
    return text


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 60 else f"{text[:20]!r} and {len(text) - 20} characters more"
