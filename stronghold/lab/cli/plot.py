"""`stronghold plot`: loss and throughput of runs as a picture."""

import argparse
import os

from stronghold.lab.cli.console import print_notes
from stronghold.lab.cli.parser import Commands, Help
from stronghold.lab.cli.shared_arguments import path, source
from stronghold.lab.outputs import check_apart, check_picture, files_of


def add_plot(commands: Commands) -> None:
    """Adds the command."""
    plot = commands.add_parser(
        "plot",
        help="draw loss and throughput of runs",
        description="Draws loss and throughput of one or several runs into one picture.",
        epilog="example:\n  stronghold plot runs/* -o comparison.png\n",
        formatter_class=Help,
    )
    plot.set_defaults(run=_run)
    plot.add_argument("runs", nargs="+", type=source, metavar="RUN", help="a run's folder, or its log.jsonl")
    plot.add_argument(
        "-o",
        "--output",
        type=path,
        default="runs.png",
        metavar="FILE",
        help="the PNG, SVG or PDF to write (default: runs.png)",
    )


def _run(options: argparse.Namespace) -> int:
    from stronghold.lab.records.figures import check_drawable, draw_runs
    from stronghold.lab.records.runs import Run, read_run

    check_apart([("--output", options.output)], inputs=[("RUN", one) for run in options.runs for one in files_of(run)])
    check_picture("--output", options.output)
    runs, notes = list[Run](), list[str]()
    for place in options.runs:
        try:
            run = read_run(place)
            notes += [*filter(None, [run.truncated]), *check_drawable(run)]
        except ValueError as error:  # one of runs/*, which was killed in its first step, say
            if len(options.runs) == 1 or not os.path.exists(place):
                raise
            notes.append(f"{place} is left out: {error}")
        else:
            runs.append(run)
    if not runs:
        raise ValueError(f"there must be a run to draw (got none: {'; '.join(notes)}); pass other runs")
    print_notes(notes)
    print(draw_runs(runs, options.output))
    return 0
