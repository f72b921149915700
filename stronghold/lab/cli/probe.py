"""`stronghold probe`: measures this machine for the planner."""

import argparse
import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stronghold.lab.cli.parser import Commands, Help
from stronghold.lab.cli.shared_arguments import path

if TYPE_CHECKING:
    from rich.console import Console

    from stronghold.planner.machine_file import MachineFile

SECONDS = 40.0
_EXAMPLES = """\
examples:
  stronghold probe
      measures this machine, and keeps it for stronghold plan
  stronghold probe --disk /mnt/nvme0 --disk /mnt/nvme1 -o machine.json
      with two disks, and a file to plan with elsewhere: stronghold plan --machine machine.json
"""


def add_probe(commands: Commands) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "probe",
        help="measure this machine, for plan",
        usage="stronghold probe [options]",
        description="Measures the link, the device, the host's updates and disks, each several times, and keeps it in\n"
        "~/.cache/stronghold/machines, where stronghold plan finds it. Let the machine do nothing else meanwhile.",
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    command.set_defaults(run=_run)
    command.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:N … (default: a GPU if there is one)")
    command.add_argument("--disk", type=path, action="append", metavar="DIR", help="measure its disk, too; repeatable")
    command.add_argument("-o", "--output", type=path, metavar="FILE", help="write what was measured there as well")
    command.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        metavar="N",
        help=f"how long to measure (default: {SECONDS:g}); about half a minute is the least, whatever is asked for: "
        "one round over everything warms up, and three are measured",
    )
    command.add_argument("--no-keep", action="store_true", help="keep nothing in ~/.cache")


def machine_of(file: str | None, device: str | None, disks: Sequence[str]) -> "MachineFile":
    """Returns the machine to plan for: of ``file``; or this one as it was kept; or else as it is measured now.

    A kept one is used if all ``disks`` were measured. Raises ValueError for a file that is no machine's, or none, and
    what ``stronghold.probe`` raises.
    """
    from stronghold.lab.outputs import plain_console
    from stronghold.planner.machine_file import MachineFile
    from stronghold.probing import kept_machine
    from stronghold.probing.this_machine import device_given

    if file is not None:
        try:
            found = MachineFile.read(file)
        except OSError as error:
            raise ValueError(
                f"--machine must be a file that stronghold probe -o wrote (got {file!r}: {error.strerror}); measure "
                "the machine, or leave it out to plan for this one"
            ) from error
        if device is not None and device_given(device).type != found.device:
            raise ValueError(
                f"a machine's file is of one device (got --device {device} with {file!r}, of {found.device}); leave "
                "out one or the other"
            )
        return found
    wanted = [os.path.realpath(disk) for disk in disks]
    kept = kept_machine(device_given(device))
    if kept is not None and all(disk in kept.disks for disk in wanted):
        return kept
    missing = "this machine" if kept is None else ", ".join(disk for disk in wanted if disk not in kept.disks)
    console = plain_console(stderr=True)
    console.print(f"{missing} has not been measured yet: stronghold probe", soft_wrap=True, markup=False)
    return _probed(console, device, disks, SECONDS, keep=True)


def _run(options: argparse.Namespace) -> int:
    from stronghold.lab.outputs import check_file, plain_console

    if options.output is not None:
        check_file("output", options.output)
    machine = _probed(
        plain_console(stderr=True),
        options.device,
        options.disk or (),
        options.seconds,
        keep=not options.no_keep,
    )
    console = plain_console()
    console.print(machine)
    if options.output is not None:
        machine.write(options.output)
        console.print(f"{options.output}: the machine; to plan for it: stronghold plan --machine", soft_wrap=True)
    return 0


def _probed(
    console: "Console", device: str | None, disks: Sequence[str], seconds: float, *, keep: bool
) -> "MachineFile":
    """Measures, and shows how far that is."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from stronghold.lab.stops import ending_at_signals
    from stronghold.probing import probe

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with contextlib.ExitStack() as stack:
        stack.enter_context(ending_at_signals())
        shown, task = Progress(*columns, console=console, transient=True), None

        def show(what: str, share: float) -> None:
            nonlocal task
            if task is None:  # an error before leaves no empty line
                stack.enter_context(shown)
                task = shown.add_task(what, total=1.0)
            shown.update(task, description=what, completed=share)

        return probe(device, directories=disks, seconds=seconds, keep=keep, progress=show)
