"""`stronghold trace`: the timeline of a step for Perfetto."""

import argparse

from stronghold.lab.cli.console import print_notes
from stronghold.lab.cli.parser import Commands, Help
from stronghold.lab.cli.shared_arguments import path, source
from stronghold.lab.outputs import check_apart, check_file, files_of


def add_trace(commands: Commands) -> None:
    """Adds the command."""
    trace = commands.add_parser(
        "trace",
        help="write a step's timeline for Perfetto",
        description="Writes the timeline of one step as a trace for https://ui.perfetto.dev and chrome://tracing.",
        epilog="example:\n  stronghold trace runs/books -o trace.json\n",
        formatter_class=Help,
    )
    trace.set_defaults(run=_run)
    trace.add_argument(
        "folder",
        type=source,
        metavar="RUN",
        help="a run's folder, or a folder of results: its newest run that has a timeline",
    )
    trace.add_argument("-o", "--output", type=path, default="trace.json", metavar="FILE", help="(default: trace.json)")


def _run(options: argparse.Namespace) -> int:
    from stronghold.lab.page.trace import write_trace

    check_file("--output", options.output)
    check_apart([("--output", options.output)], inputs=[("RUN", one) for one in files_of(options.folder)])
    name, notes = write_trace(options.folder, options.output)
    print_notes(notes)
    print(f"{options.output}: a step of {name}")
    return 0
