"""Trains GPT-2 in each way in turn, and sets training time and tokens per second beside one another.

    python examples/gpt2_parallel/compare.py [--processes 2] [--rounds 3] [--out gpt2_parallel.jsonl] …

Each run is a torchrun of train.py, which all other options go to (train.py --help has them); a round has a run of each
way. The losses of every run must be those of the first, one process's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from draw import by_way, draw, spread
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from stronghold.lab.records.json_lines import Record, append_record, read_records

TRAIN = Path(__file__).parent / "train.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="replicas, or stages (2)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way (3)")
    parser.add_argument(
        "--all-cores",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare with one process that has all of their cores, too",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpt2_parallel.jsonl"),
        help="a new file, for a JSON line for each run; the figures go beside it (gpt2_parallel.jsonl)",
    )
    options, training = parser.parse_known_args()
    if options.processes < 2 or options.rounds < 1:
        parser.error(
            f"--processes must be 2 or more, --rounds 1 or more (got {options.processes} and {options.rounds})"
        )
    if options.out.exists():
        parser.error(f"--out must be a new file (got {options.out}, which is there); remove it, or pass another")
    count = options.processes
    ways = [
        (1, "one-process"),
        (count, "data-parallelism"),
        (count, "stages-without-micro-batches"),
        (count, "stages"),
        *([(1, "one-process", "--cores", str(count))] if options.all_cores else []),
    ]
    records: list[Record] = []
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=options.rounds * len(ways))
        for _ in range(options.rounds):
            for processes, *arguments in ways:
                progress.update(task, description=arguments[0])
                records.append(run(processes, [*arguments, *training]))
                check(records[-1], records[0])
                append_record(options.out, records[-1])
                progress.advance(task)
    Console().print(table(records))
    for path in draw(records, options.out.with_suffix("")):
        print(path)


def run(processes: int, arguments: list[str]) -> Record:
    """Returns the record of a run of train.py in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.jsonl"
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [sys.executable, *torchrun, str(TRAIN), *arguments, "--out", str(out)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout}\nerror: {' '.join(command)} failed, as told above")
        return read_records(out).records[0]


def check(record: Record, first: Record) -> None:
    """Exits where the losses are not those of the first run."""
    for step, (ours, expected) in enumerate(zip(record["losses"], first["losses"], strict=True), start=1):
        if not abs(ours - expected) <= 1e-5 * expected:
            raise SystemExit(f"error: by {record['way']} step {step} has a loss of {ours}, in one process {expected}")


def table(records: list[Record]) -> Table:
    """Returns a line for each way: medians of its runs, and how far a loss is from the first run's at the most."""
    first = records[0]
    table = Table(
        title=f"{first['steps']} steps of {first['batch']} x {first['sequence']} tokens, runs: {len(records)}"
    )
    table.add_column("way", overflow="fold")
    for column in ("processes", "cores", "seconds", "least", "most", "tokens/s", "furthest loss"):
        table.add_column(column, justify="right", no_wrap=column not in ("processes", "furthest loss"), min_width=5)
    for runs in by_way(records):
        one = runs[0]
        losses = (zip(run["losses"], first["losses"], strict=True) for run in runs)
        furthest = max(abs(ours - expected) / expected for pairs in losses for ours, expected in pairs)
        table.add_row(
            one["way"],
            str(one["processes"]),
            str(one["processes"] * one["cores_each"]),
            *(f"{seconds:.3f}" for seconds in spread(runs, "training_seconds")),
            f"{spread(runs, 'tokens_per_second').median:,.0f}",
            f"{furthest:.1e}",
        )
    return table


if __name__ == "__main__":
    main()
