"""`stronghold report`: a folder of results as one page."""

import argparse

from stronghold.lab.cli.console import print_notes
from stronghold.lab.cli.parser import Commands, Help
from stronghold.lab.cli.shared_arguments import path, source
from stronghold.lab.outputs import check_apart, check_page, files_of_results


def add_report(commands: Commands) -> None:
    """Adds the command."""
    report = commands.add_parser(
        "report",
        help="write results as one page",
        description="Writes the runs of a folder as one HTML page that needs no network: machines, a table of\n"
        "methods and runs, loss, memory, and a timeline of one step to zoom into.",
        epilog="example:\n  stronghold report results/ -o report.html\n",
        formatter_class=Help,
    )
    report.set_defaults(run=_run)
    report.add_argument(
        "results", type=source, metavar="RESULTS", help="a folder with runs.jsonl, runs' folders, or both"
    )
    report.add_argument(
        "-o", "--output", type=path, default="report.html", metavar="FILE", help="(default: report.html)"
    )
    report.add_argument(
        "--run",
        dest="timeline_of",
        metavar="NAME",
        help="the run whose timeline is shown (default: the newest that has one)",
    )


def _run(options: argparse.Namespace) -> int:
    from stronghold.lab.page.cases import case_figures
    from stronghold.lab.page.page import write_page

    check_page("--output", options.output)
    read = [("RESULTS", file) for file in files_of_results(options.results)]
    check_apart([("--output", options.output)], inputs=read)
    figures, notes = case_figures(options.results)
    print_notes(write_page(options.results, options.output, run=options.timeline_of, figures=figures, notes=notes))
    print(options.output)
    return 0
