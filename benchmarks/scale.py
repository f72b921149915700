"""What a step of 70 B, 405 B and 1 T parameters comes to over up to 1,024 devices, on paper: no device is needed.

    python benchmarks/scale.py [--models 70B 405B 1T] [--layouts 8x8 64x16 …] [--tflops 400] [--network 45GB/s] …

A layout is stages × replicas. Layers are cut by stronghold.planner.partition, the schedule's passes are played by
stronghold.planner.simulate, and bytes follow stronghold.planner.link_bytes. Prints a table and appends one JSON line
per row to results/scale.jsonl.

What is assumed: bf16 compute; every layer and the head recomputed; the replicas of a stage are neighbours on a node; a
window of each device's layers on the device, the others fetched anew by every pass. A pass takes as long as the longest
of its arithmetic, its fetches (a replica's own share from its host, the others' over the devices' links) and, backward,
its gradients' way: summed over the replicas, each replica's share down to its host and added there. With --reduce step
the gradients of a step's micro-batches are summed on the device first, which needs room there for all of its layers'. A
layer's update hides under the next step's first forward pass; what is longer counts. Links of different kinds do not
disturb one another. Bytes are a step's, each way, of the device, link or node that has most.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from scale_step import KEPT_BYTES, Machine, Run, play

from stronghold.lab.models.gpt import GPTConfig
from stronghold.lab.records.json_lines import append_record, describe_machine
from stronghold.planner.pipeline_order import SCHEDULES, Pipeline
from stronghold.units import format_bytes, format_count, format_seconds, parse_bytes

RESULTS = Path(__file__).parent.parent / "results" / "scale.jsonl"
MODELS = {"70B": (86, 8192), "405B": (126, 16384), "1T": (128, 25600)}  # layers and width
LAYOUTS = ((8, 8), (16, 16), (64, 4), (32, 32), (64, 16))
COLUMNS = {
    "parameters": "right",
    "schedule": "left",
    "stages x replicas": "right",
    "micro-batches": "right",
    "step": "right",
    "bubble": "right",
    "longest": "left",
    "of FLOP/s": "right",
    "stage link": "right",
    "replica link": "right",
    "host up": "right",
    "host down": "right",
    "host a node": "right",
    "activations": "right",
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    machine = Machine(
        flops=options.tflops * 1e12,
        devices_per_node=options.devices_per_node,
        node_link=options.node_link,
        network=options.network,
        host_link=options.host_link,
        host_memory=options.host_memory,
    )
    table = Table(title=f"{options.batch:,} samples of {options.sequence:,} tokens per step")
    for column, side in COLUMNS.items():
        table.add_column(column, justify=side)  # type: ignore[arg-type]
    left_out: list[str] = []
    described = describe_machine()
    for run in _runs(options, left_out):
        found = play(run, machine)
        pipeline = run.pipeline
        table.add_row(
            format_count(run.model.parameters),
            pipeline.schedule,
            f"{pipeline.devices} x {run.replicas}",
            str(pipeline.micro_batches),
            format_seconds(found["step_s"]),
            f"{found['bubble']:.1%}",
            found["longest"],
            f"{found['of_flops']:.1%}",
            format_bytes(found["stage_link_bytes"]),
            format_bytes(found["replica_link_bytes"]),
            format_bytes(found["host_up_bytes"]),
            format_bytes(found["host_down_bytes"]),
            format_bytes(found["host_bytes"]),
            format_bytes(found["activation_bytes"]),
        )
        settings = {name: getattr(options, name) for name in ("batch", "sequence", "micro_batch", "window", "reduce")}
        append_record(
            options.out,
            {
                "benchmark": "scale",
                "parameters": run.model.parameters,
                "layers": run.model.layers,
                "hidden": run.model.hidden,
                **asdict(pipeline),
                "replicas": run.replicas,
                **settings,
                "machine": asdict(machine),
                **found,
                **described,
            },
        )
    console = Console(width=200)
    console.print(table)
    for line in left_out:
        console.print(f"left out: {line}", markup=False, highlight=False)


def _runs(options: argparse.Namespace, left_out: list[str]) -> Iterator[Run]:
    """Yields what is asked for; what cannot be goes to ``left_out``, with the reason."""
    for layers, hidden in options.models:
        model = GPTConfig(layers=layers, hidden=hidden, heads=1, sequence=options.sequence)  # heads change no number
        for stages, replicas in options.layouts:
            for schedule in options.schedules:
                try:
                    run = _run(options, model, stages, replicas, schedule)
                except ValueError as error:
                    left_out.append(f"{layers} layers, {schedule}, {stages} x {replicas}: {error}")
                else:
                    yield run


def _run(options: argparse.Namespace, model: GPTConfig, stages: int, replicas: int, schedule: str) -> Run:
    micro_batches, rest = divmod(options.batch, replicas * options.micro_batch)
    if rest:
        raise ValueError(
            "replicas · micro_batch must divide the batch "
            f"(got replicas={replicas}, micro_batch={options.micro_batch}, batch={options.batch})"
        )
    pipeline = Pipeline(
        schedule=schedule,
        devices=stages,
        micro_batches=micro_batches,
        stages_per_device=options.stages_per_device if schedule == "Interleaved1F1B" else 1,
    )
    if pipeline.stages > model.layers:
        raise ValueError(f"each stage needs a layer (got stages={pipeline.stages}, layers={model.layers})")
    return Run(
        model=model,
        pipeline=pipeline,
        replicas=replicas,
        batch=options.batch,
        micro_batch=options.micro_batch,
        window=options.window,
        reduce=options.reduce,
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1 (got {text!r})")
    return int(text)


def _pair(text: str) -> tuple[int, int]:
    first, _, last = text.partition("x")
    return _count(first), _count(last)


def _model(text: str) -> tuple[int, int]:
    return MODELS.get(text) or _pair(text)


def _tflops(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0 (got {text!r})")
    return float(text)


def _bandwidth(text: str) -> int:
    try:
        return _count(str(parse_bytes(text.removesuffix("/s"))))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    models = list(MODELS.values())
    add("--models", type=_model, nargs="+", default=models, help="70B, 405B, 1T or LAYERSxWIDTH (default: the three)")
    add("--layouts", type=_pair, nargs="+", default=LAYOUTS, help="STAGESxREPLICAS, a device each")
    add("--schedules", choices=SCHEDULES, nargs="+", default=SCHEDULES[1:], help="(default: 1F1B Interleaved1F1B)")
    add("--stages-per-device", type=_count, default=2, help="of Interleaved1F1B (default: 2)")
    add("--batch", type=_count, default=2048, help="samples per step, over all replicas (default: 2048)")
    add("--micro-batch", type=_count, default=1, help="samples of a micro-batch (default: 1)")
    add("--sequence", type=_count, default=4096, help="tokens of a sample (default: 4096)")
    add("--window", type=_count, default=4, help="layers on a device at a time (default: 4)")
    add("--reduce", choices=list(KEPT_BYTES), default="micro-batch", help="when replicas sum gradients (see above)")
    add("--tflops", type=_tflops, default=400, help="what a device sustains, in TFLOP/s (default: 400)")
    add("--devices-per-node", type=_count, default=8, help="(default: 8)")
    for name, bandwidth, what in (
        ("node-link", "350GB/s", "from a device to others of its node"),
        ("network", "45GB/s", "from a device to those of other nodes"),
        ("host-link", "55GB/s", "from a device to its host, and back"),
        ("host-memory", "600GB/s", "of a node's memory"),
    ):
        add(f"--{name}", type=_bandwidth, default=bandwidth, help=f"bandwidth {what} (default: {bandwidth})")
    add("--out", type=Path, default=RESULTS, help="file of JSON lines to append to (default: results/scale.jsonl)")
    return parser


if __name__ == "__main__":
    main()
