"""ResNet-50 and VGG-16 in stages on the CPU: seconds per batch for several partitions, and for several batches.

    torchrun --nproc-per-node 4 examples/pipeline_cnn/compare.py [--models resnet50] [--batch 16] [--out runs.jsonl] …

Each process is a stage, on a core of its own where there are as many. Beside the pipeline stands one process on one
core, which trains the same micro-batches: its losses must be those of every partition, and its seconds divided by the
stages (by the cores, where there are fewer) are the ideal.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch.distributed as dist
from measuring import Comparison, take_core
from rich.console import Console
from rich.progress import Progress
from tables import batches_table, partitions_table

PARTITIONS = ("layers", "parameters", "memory", "time")


def main() -> None:
    options = parse()
    cores = take_core()
    dist.init_process_group("gloo")
    console = Console(quiet=dist.get_rank() > 0)
    for name in options.models:
        with Progress(console=console, transient=True) as progress:
            comparison = Comparison(name, options, cores, progress)
            records = [comparison.run(options.batch, balance) for balance in options.balance]
            best = min(records, key=lambda record: record["seconds"])
            batches = [comparison.run(batch, best["layers"]) for batch in options.batches]
        console.print(partitions_table(records, best), batches_table(batches, best), sep="\n\n")
        if options.out is not None and dist.get_rank() == 0:
            with open(options.out, "a", encoding="utf-8") as file:
                for table, rows in (("partitions", records), ("batches", batches)):
                    for record in rows:
                        file.write(json.dumps({"table": table, **record, "best": record is best}) + "\n")
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("resnet50", "vgg16"), default=["resnet50", "vgg16"])
    parser.add_argument(
        "--balance",
        nargs="+",
        type=partition,
        default=PARTITIONS,
        help="partitions to compare: equal numbers of layers, of parameters, least memory and least time as measured, "
        "or numbers of layers such as 4,5,6,3 (layers parameters memory time)",
    )
    parser.add_argument("--batch", type=int, default=16, help="images per batch while partitions are compared (16)")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 8, 16], help="then, the best one (1 4 8 16)")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a batch of as many images or more (8)")
    parser.add_argument("--image", type=int, default=224, help="height and width of the images (224)")
    parser.add_argument("--width", type=int, default=64, help="channels behind the first convolution (64)")
    parser.add_argument("--warmup", type=int, default=2, help="batches that are not counted (2)")
    parser.add_argument("--steps", type=int, default=5, help="batches that are (5)")
    parser.add_argument("--out", type=Path, help="a file to append a JSON line for each measurement to")
    options = parser.parse_args()
    if options.image < 64:
        parser.error(f"--image must be 64 or more, so that BatchNorm has values to average (got {options.image})")
    if options.steps < 1 or options.warmup < 0:
        parser.error(f"--steps must be 1 or more, --warmup 0 or more (got {options.steps} and {options.warmup})")
    if not dist.is_torchelastic_launched():
        parser.error(f"stages are processes: start it with torchrun --nproc-per-node 4 {sys.argv[0]}")
    return options


def partition(text: str) -> str | list[int]:
    return text if text in PARTITIONS else [int(size) for size in text.split(",")]


if __name__ == "__main__":
    main()
