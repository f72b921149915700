"""Touches the host's memory once, so that what is measured later does not pay for its first use.

    python benchmarks/gpu/touch.py [--leave 8GiB] [--seconds 90]

A virtual machine may be given its memory page by page, as it is used: then the first copy into a page takes many times
as long as the next. Takes memory by the GiB until all but --leave is taken or --seconds are over, fills it with every
thread, gives it back, and touches one part again to say what the first use costs. Appends a JSON line to touch.jsonl.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch
from half_hour import Recorded, add_options, say

from stronghold.device import available_host_bytes
from stronghold.device.memory import HostBuffer
from stronghold.native import most_host_bytes
from stronghold.units import format_bytes, format_seconds, parse_bytes

PART_BYTES = 2**30


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    part_bytes = PART_BYTES // 64 if options.small else PART_BYTES
    room = min(available_host_bytes(), most_host_bytes(0)) - options.leave
    if options.small:
        room = min(room, 4 * part_bytes)
    held: list[HostBuffer] = []
    begin_s = time.perf_counter()
    while (len(held) + 1) * part_bytes <= room and time.perf_counter() - begin_s < options.seconds:
        held.append(HostBuffer(part_bytes))
        held[-1].flat.fill_(1)
    first_s = (time.perf_counter() - begin_s) / max(1, len(held))
    count = len(held)
    del held
    if not count:
        say(f"nothing to touch: {format_bytes(max(0, room + options.leave))} are free, and --leave is not")
        return 0
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
