"""``python -m stronghold.lab.cases``: what the scripts in examples/ call."""

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stronghold.lab.cases.case import CASES
from stronghold.lab.cases.drawing import save_figure
from stronghold.lab.cases.largest import find_largest
from stronghold.lab.cases.machines import MACHINES, find_machine
from stronghold.lab.cases.points import Shown, in_words, show
from stronghold.lab.cases.reading import read_results
from stronghold.lab.cases.running import Place, run_case
from stronghold.lab.cases.table import csv_text, tables
from stronghold.lab.command import FAILED, WRONG_USAGE, in_one_line, run_command
from stronghold.lab.outputs import check_file, check_folder, plain_console
from stronghold.lab.records.agreement import disagreements

DEFAULT_RESULTS, DEFAULT_MACHINE = Path("results"), "cpu"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs, extracts or draws the case that ``arguments`` name, and returns the exit code.

    After ``needs`` it only prints the modules that this takes beside the project's own.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["needs"]:
        print(*_needs(_parser().parse_args(words[1:])))
        return 0
    return run_command(_parser(), words, _tell)


def _needs(options: argparse.Namespace) -> Sequence[str]:
    if options.run is not _run or CASES[options.case].varies:  # which has runs of stronghold alone
        return ()
    methods = find_machine(options.machine).methods
    return ("deepspeed", "ninja") if any(method.startswith("zero-") for method in methods) else ()


def _tell(error: Exception, options: argparse.Namespace) -> int:
    if not isinstance(error, ValueError | OSError):
        raise error
    print(f"case {options.case}: error: {in_one_line(error)}", file=sys.stderr)
    return WRONG_USAGE if isinstance(error, ValueError) else FAILED


def _run(options: argparse.Namespace) -> int:
    check_folder("--results", options.results)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it for the second
            signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that the process that trains ends, too
    case, preset = CASES[options.case], find_machine(options.machine)
    place = Place(results=options.results, device=options.device or _device(), again=options.again)
    failed = (find_largest if case.largest else run_case)(case, preset, place, lambda line: print(line, flush=True))
    there = ["--machine", preset.name] if preset.name != DEFAULT_MACHINE else []
    there += ["--results", str(options.results)] if options.results != DEFAULT_RESULTS else []
    command = shlex.join([f"examples/case{case.number}_extract.sh", *there])
    print(f"results in {options.results}; {command} has the table")
    return FAILED if failed else 0


def _extract(options: argparse.Namespace) -> int:
    path = options.csv or _stem(options).with_suffix(".csv")
    check_file("--csv", path)
    shown = _shown(options)
    console = plain_console(width=None if sys.stdout.isatty() else 150)
    for table in tables(shown):
        console.print(table)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(csv_text(shown), encoding="utf-8")
    print(path)
    return 0


def _draw(options: argparse.Namespace) -> int:
    stem = options.output or _stem(options)
    for suffix in (".png", ".svg"):
        check_file("--output", stem.with_name(stem.name + suffix))
    for path in save_figure(_shown(options), stem):
        print(path)
    return 0


def _shown(options: argparse.Namespace) -> Shown:
    """Returns what the case shows, its notes said. Raises ValueError if there is nothing of it."""
    case, preset = CASES[options.case], find_machine(options.machine)
    paths = options.results or [DEFAULT_RESULTS]
    results = read_results(paths, disagreements)
    shown = show(case, preset, results.measurements, on=options.measured_on)
    for note in (*results.notes, *shown.notes):
        print(f"note: {note}", file=sys.stderr)
    for point in (point for panel in shown.panels for point in panel.points if point.wrong):
        print(f"wrong: {in_words(point.wanted)}: {point.wrong}", file=sys.stderr)
    logged = any(point.measurement for point in shown.published.points)
    if shown.here is None and not logged:
        raise ValueError(
            f"there must be results of case {case.number} in the settings of --machine {preset.name} (got none in "
            f"{', '.join(map(str, paths))}); run examples/case{case.number}_run.sh --machine {preset.name} first"
        )
    return shown


def _stem(options: argparse.Namespace) -> Path:
    """Returns where a case's table and figure go, without the suffix: into the first folder of results."""
    folder = next((path for path in options.results or [] if path.is_dir()), DEFAULT_RESULTS)
    return Path(folder) / f"case{options.case}_{options.machine}"


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("must be a path (got '')")
    return Path(text)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _parser() -> argparse.ArgumentParser:
    presets = "".join(f"\n  {machine.name:<5} {machine.about}" for machine in MACHINES.values())
    cases = "".join(f"\n  {case.number}  {case.title} ({case.figure})" for case in CASES.values())
    parser = argparse.ArgumentParser(prog="python -m stronghold.lab.cases", description="The paper's cases.")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for name, run, about in (
        ("run", _run, "Makes the runs of a case that its results do not have yet."),
        ("extract", _extract, "Prints a case's table, and writes it as CSV."),
        ("draw", _draw, "Draws a case's figure, as PNG and SVG."),
    ):
        action = actions.add_parser(
            name,
            help=about,
            description=about,
            epilog=f"cases:{cases}\n\nmachines:{presets}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        action.set_defaults(run=run)
        add: Any = action.add_argument
        add("case", type=int, choices=tuple(CASES), metavar="CASE", help="the case's number, 1 to 5")
        add(
            "--machine",
            choices=tuple(MACHINES),
            default=DEFAULT_MACHINE,
            help="the settings to measure in (default: cpu)",
        )
        if name == "run":
            add(
                "--results", type=_path, default=DEFAULT_RESULTS, metavar="DIR", help="where they go (default: results)"
            )
            add("--device", help="cpu, cuda or cuda:N (default: cuda where there is one, else cpu)")
            add("--again", action="store_true", help="also make those that are there, of this machine and this commit")
            continue
        results = "folders of results, records, or logs of the paper's artifact (default: results)"
        add("--results", type=_path, nargs="+", metavar="PATH", help=results)
        add("--measured-on", metavar="TEXT", help="a part of the name of the one machine to show, of several")
        if name == "extract":
            add("--csv", type=_path, metavar="FILE", help="(default: caseN_MACHINE.csv among the results)")
        else:
            add("-o", "--output", type=_path, metavar="STEM", help="without suffix (default: caseN_MACHINE, likewise)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
