"""The arguments of commands that say which adapters are trained, in place of all weights."""

from __future__ import annotations

import argparse
from typing import Any

from stronghold.checkpoint.quantising import KINDS
from stronghold.lab.cli.shared_arguments import Group, source, whole
from stronghold.lab.finetuning.settings import AdapterSettings

ADAPTER_DEFAULTS: dict[str, Any] = {
    "lora": None,
    "lora_alpha": None,
    "lora_dropout": 0.0,
    "targets": ("all-linear",),
    "quantize": None,
    "adapter": None,
}
"""What an argument is that is not given."""
_OF_NEW = ("lora", "lora_alpha", "lora_dropout", "targets")


def add_adapters(adapters: Group) -> None:
    """Adds the arguments; each is None where it is not given."""
    adapters.add_argument(
        "--lora", nargs="?", const=16, type=whole, metavar="RANK", help="train new LoRA adapters (default rank: 16)"
    )
    adapters.add_argument("--lora-alpha", type=float, metavar="X", help="their scale (default: twice the rank)")
    adapters.add_argument("--lora-dropout", type=float, metavar="P", help="dropout before them (default: 0)")
    adapters.add_argument(
        "--targets", type=_names, metavar="NAME,…", help="layers that get one (default: all-linear: all but the head)"
    )
    adapters.add_argument(
        "--quantize",
        choices=KINDS,
        help="keep the base in bitsandbytes' four bits, nested: with scales in eight, or in eight bits (default: the "
        "compute type)",
    )
    adapters.add_argument("--adapter", type=source, metavar="DIR", help="train the LoRA adapters of a folder further")


def given_adapters(options: argparse.Namespace) -> AdapterSettings | None:
    """Returns what the arguments say of adapters, None for none. Raises ValueError where they contradict another."""
    given = {name: getattr(options, name) for name in ADAPTER_DEFAULTS if getattr(options, name) is not None}
    said = ADAPTER_DEFAULTS | given
    new = [name for name in _OF_NEW if said[name] != ADAPTER_DEFAULTS[name]]
    if said["adapter"] is not None and new:
        names = ", ".join("--" + name.replace("_", "-") for name in new)
        raise ValueError(
            f"adapters of a folder have their own rank, scale, dropout and layers (got --adapter with {names}); leave "
            "out one or the other"
        )
    if said["adapter"] is None and said["lora"] is None:
        if new or said["quantize"]:
            raise ValueError(
                "--lora-alpha, --lora-dropout, --targets and --quantize are of adapters (got none); pass --lora too"
            )
        return None
    rank = 16 if said["lora"] is None else said["lora"]
    return AdapterSettings(
        path=said["adapter"],
        rank=rank,
        alpha=2.0 * rank if said["lora_alpha"] is None else said["lora_alpha"],
        lora_dropout=said["lora_dropout"],
        targets=said["targets"],
        quantize=said["quantize"],
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))
