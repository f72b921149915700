"""Touches the host's memory once, so that what is measured later does not pay for its first use.

    python benchmarks/gpu/touch.py [--leave 8GiB] [--seconds 90]

A virtual machine may be given its memory page by page, as it is used: then the first copy into a page takes many times
as long as the next. Takes memory by the GiB until all but --leave is taken or --seconds are over, fills it with every
thread, gives it back, and touches one part again to say what the first use costs. What is free is asked again for each
part, for such a machine's memory may grow with its use. Appends a JSON line to touch.jsonl.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch
from half_hour import Budget, Recorded, add_options, budget_of, say

from stronghold.device import available_host_bytes
from stronghold.device.memory import HostBuffer
from stronghold.native import most_host_bytes
from stronghold.units import format_bytes, format_seconds, parse_bytes

PART_BYTES = 2**30
END_S = 10.0
"""For giving all of it back, and for the record, which asks CUDA for the device's name."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    part_bytes = PART_BYTES // 64 if options.small else PART_BYTES
    most = 4 * part_bytes if options.small else sys.maxsize
    budget = Budget(min(options.seconds, budget_of(options).left_s - END_S))
    held: list[HostBuffer] = []
    began_s = begin_s = time.perf_counter()
    # Behind a part that was slow there must be time for another, and for the one that is touched again.
    while budget.allows(times_longest=2) and part_bytes <= min(_room(held, options), most - len(held) * part_bytes):
        begin_s = time.perf_counter()
        held.append(HostBuffer(part_bytes))
        held[-1].flat.fill_(1)
        budget.took(time.perf_counter() - begin_s)
    first_s = (time.perf_counter() - began_s) / max(1, len(held))
    count = len(held)
    if not count:
        free = format_bytes(max(0, _room(held, options) + options.leave))
        say(f"nothing is touched: {free} are free, {format_bytes(options.leave)} are left, and the time is what it is")
        return 0
    del held
    buffer = HostBuffer(part_bytes)
    begin_s = time.perf_counter()
    buffer.flat.fill_(1)
    again_s = time.perf_counter() - begin_s
    each = {"first": first_s * 2**30 / part_bytes, "again": again_s * 2**30 / part_bytes}
    Recorded("touch", options).add({"bytes": count * part_bytes}, {"s_per_gib": each})
    say(
        f"touched {format_bytes(count * part_bytes)}: {format_seconds(each['first'])} per GiB the first time, "
        f"{format_seconds(each['again'])} in pages that were given back"
    )
    return 0


def _room(held: Sequence[HostBuffer], options: argparse.Namespace) -> int:
    """Returns the bytes that may be taken beside ``held``."""
    taken = sum(one.flat.nbytes for one in held)
    return min(available_host_bytes(), most_host_bytes(taken)) - options.leave


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--leave", type=parse_bytes, default=8 * 2**30, metavar="SIZE", help="what is left (8GiB)")
    parser.add_argument("--seconds", type=float, default=90.0, metavar="S", help="that this may take (90)")
    options = parser.parse_args(arguments)
    options.seconds = min(options.seconds, 60 * options.minutes)
    options.small = options.small or torch.device(options.device).type == "cpu"
    return options


if __name__ == "__main__":
    sys.exit(main())
