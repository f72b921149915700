"""``python -m tests.fuzz``: random sequences of a user's operations, on offloaded models beside plain ones."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.hunt import Found, Hunt, Watchdog
from tests.fuzz.known import KNOWN
from tests.fuzz.programs import Program
from tests.fuzz.running import REFUSALS

EPILOG = """
Each case is a program: a small model with random features, one to three ways to offload it, and what a user does with
it. Every way must do the same to the bit, errors included, and the same as plain PyTorch with the same optimizer: to
the bit with the optimizers of torch.optim in fp32 and with bf16 weights, to rounding with AdamW in fp32. An error that
says why is allowed where it changes nothing. A failing program is made as small as it goes and printed; more failures
by the same cause are counted alone. The exit status is 1 when any program failed by a cause that is not known.
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__, epilog=EPILOG)
    parser.add_argument("--seconds", type=float, default=60, help="how long to go on (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first round's; the same finds the same (default: 0)")
    parser.add_argument("--operations", type=int, default=14, help="at most so many a program (default: %(default)s)")
    parser.add_argument("--minimise", type=float, default=90, help="seconds to make one smaller (default: %(default)s)")
    parser.add_argument("--hang", type=float, default=120, help="a program that takes longer hangs (default: 120 s)")
    arguments = parser.parse_args()

    faulthandler.enable()
    gc.collect()
    gc.freeze()  # what was imported: every case collects garbage
    begin, told = time.monotonic(), 0.0
    current = Path(tempfile.gettempdir()) / f"fuzz-{os.getpid()}.txt"
    print(f"the program under way is in {current}, should the process die", flush=True)

    def tell(hunt: Hunt) -> None:
        nonlocal told
        if (now := time.monotonic()) - told > 10:
            told = now
            print(
                f"{now - begin:6.0f} s  seed {arguments.seed}  {hunt.count} programs, "
                f"{sum(hunt.counts.values())} failed, by {len(hunt.found)} causes that are not known",
                flush=True,
            )

    hunt = Hunt(
        operations=arguments.operations,
        minimise_s=arguments.minimise,
        known=KNOWN,
        tell=tell,
        tell_found=lambda found: print(f"\n{describe(found)}\n", flush=True),
        file=current,
    )
    Watchdog(hunt, arguments.hang, _hung)
    hunt.run(arguments.seconds, arguments.seed)
    current.unlink(missing_ok=True)
    _conclude(hunt)
    return 1 if hunt.found else 0


def _conclude(hunt: Hunt) -> None:
    for found in hunt.found:
        print(f"{hunt.counts[found.cause]} times: {found.failure.kind} {found.failure.place}")
    for place, count in REFUSALS.most_common():
        print(f"refused: {place}: {count} times")
    for cause in KNOWN:
        if hunt.counts[cause]:
            print(f"known: {cause.name}: {hunt.counts[cause]} times")
    print(f"{hunt.count} programs, {sum(hunt.counts.values())} failed, by {len(hunt.found)} causes that are not known")


def describe(found: Found) -> str:
    """Tells of one cause, with a program that reproduces it."""
    failure = found.failure
    return (
        f"{failure.kind} {failure.place}\n  {failure.message[:600]}\n  at {failure.where}\n"
        f"from tests.fuzz.short import *\ncheck({found.program!r})"
    )


def _hung(program: Program) -> None:
    print(f"\nhangs:\nfrom tests.fuzz.short import *\ncheck({program!r})", flush=True)
    faulthandler.dump_traceback()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
