"""Machines that nobody has measured: a card and its host by their makers' numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stronghold.planner.machine_file import Attention, MachineFile, Product, Spread
from stronghold.planner.machine_rates import UPDATED_BYTES

GIB = 2**30


@dataclass(frozen=True)
class Card:
    """A card by its maker's numbers: dense FLOP/s of products in bf16, summed in fp32, and in fp32; bytes and bytes/s.

    ``share`` of the former is what large products reach. ``link`` is one way of what it is plugged into, and ``host``
    the memory of such a machine, which updates and nothing else reads and writes.
    """

    name: str
    bf16: float
    fp32: float
    share: float
    memory_bytes: int
    memory: float
    link: float
    host: float


CARDS = (
    Card("RTX 3090", 71e12, 35.6e12, 0.9, 24 * GIB, 0.936e12, 25e9, 80e9),
    Card("RTX 4090", 165.2e12, 82.6e12, 0.9, 24 * GIB, 1.008e12, 25e9, 80e9),
    Card("RTX 5090", 209.5e12, 104.8e12, 0.9, 32 * GIB, 1.792e12, 50e9, 80e9),
    Card("A100 80GB", 312e12, 19.5e12, 0.8, 80 * GIB, 2.039e12, 25e9, 200e9),
    Card("H100 SXM", 989e12, 66.9e12, 0.72, 80 * GIB, 3.35e12, 50e9, 250e9),
    Card("H200 SXM", 989e12, 66.9e12, 0.72, 140 * GIB, 4.8e12, 50e9, 250e9),
)

BESIDE_CARD = "nothing was measured: beside the card are a usual link, host and drives"
"""What a plan for such a machine assumes."""
_DRIVE = {"read": 6e9, "write": 4.5e9, "read_beside_write": 3e9, "write_beside_read": 2.5e9}


def card_named(name: str) -> Card:
    """Returns the card that is meant by ``name``, such as "4090" or "rtx4090". Raises ValueError for none or several.

    All words of the name are in the card's, or several of those are written as one.
    """
    words = _words(name)
    found = [card for card in CARDS if words and ({*words} <= {*_words(card.name)} or "".join(words) in _runs(card))]
    if len(found) != 1:
        known = ", ".join(card.name for card in CARDS)
        raise ValueError(
            f"a card must be one of {known} (got {name!r}); pass one, or the file that stronghold probe wrote "
            "on the machine"
        )
    return found[0]


def machine_of_card(card: Card, host_bytes: int, directories: Sequence[str] = ()) -> MachineFile:
    """Returns the card in a machine of so much memory as a file of one that was measured would have them.

    What no maker tells is what such machines were seen to do: both ways of a link at once take 0.85 of each, smaller
    products and attention a share of large ones, and everything may be a quarter slower or a tenth faster. Each of the
    ``directories`` is on a solid-state drive of its own, on four lanes of PCI Express 4.
    """
    elements = {dtype: _about(0.9 * card.memory) for dtype in ("float32", "bfloat16")}
    rates = {"float32": card.fp32 * card.share, "bfloat16": card.bf16 * card.share}
    return MachineFile(
        device="cuda",
        device_name=f"{card.name}, by its maker's numbers",
        is_host=False,
        runs_behind=True,
        device_memory_bytes=card.memory_bytes,
        host_memory_bytes=host_bytes,
        cores=16,
        processor="",
        time="",
        versions={},
        link={
            **dict.fromkeys(("h2d", "d2h"), _about(card.link)),
            **dict.fromkeys(("h2d_beside_d2h", "d2h_beside_h2d"), _about(0.85 * card.link)),
            "h2d_pageable": _about(0.4 * card.link),
            "copy_s": _taking(1e-5),
        },
        matmul=[
            Product(dtype, (size, size, size), _about(rate * part))
            for dtype, rate in rates.items()
            for size, part in ((512, 0.4), (4096, 1.0))
        ],
        attention=[
            Attention(dtype, (8, 32, 1024, 1024, 128), _about(0.6 * rate), _about(0.45 * rate))
            for dtype, rate in rates.items()
        ],
        elementwise=elements,
        elementwise_cached={dtype: _about(2 * one.likely) for dtype, one in elements.items()},
        transcendental=elements,
        cache_bytes=50 * 2**20,
        op_s=_taking(4e-6),
        launch_s=_taking(5e-6),
        host_update_ns={
            form: dict.fromkeys(("alone", "beside_compute"), _taking(1e9 * moved / card.host))
            for form, moved in _forms().items()
        },
        compute_beside_update=Spread(1.0, 1.0, 1.0),
        disks={path: {way: _about(rate) for way, rate in _DRIVE.items()} for path in directories},
        device_update_ns={form: _taking(1e9 * moved / (0.9 * card.memory)) for form, moved in _forms().items()},
    )


def _forms() -> dict[str, int]:
    return {f"{dtype}+{states}": moved for (dtype, states), moved in UPDATED_BYTES.items()}


def _about(rate: float) -> Spread:
    return Spread(0.75 * rate, rate, 1.1 * rate)


def _taking(time: float) -> Spread:
    return Spread(time / 1.1, time, time / 0.75)


def _words(name: str) -> list[str]:
    return re.findall("[a-z0-9]+", name.lower())


def _runs(card: Card) -> set[str]:
    """Returns the words of its name that follow one another, as one."""
    words = _words(card.name)
    return {"".join(words[begin:end]) for begin in range(len(words)) for end in range(begin + 1, len(words) + 1)}
