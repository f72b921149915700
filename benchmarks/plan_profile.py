"""How plans from Aceso's profiles compare with Aceso's own: its published plans replayed, and its searches repeated.

    python -m benchmarks.plan_profile DIR [--plans DIR] [--only NAME]

DIR holds the profiles of Aceso's artifact (github.com/microsoft/SuperScaler, branch Aceso: profiler/profiled-time-
eurosys), --plans its plans for one device (search/single_gpu_configs). Predictions and search times of Aceso are those
that its artifact publishes (results/ref), for the models, devices, batches and memory of its scripts; for T5, of which
it publishes none, its own search was run for 200 s with a process for each number of stages, on a machine of two cores
with other load, which counts in its disfavour. Prints two tables and appends JSON lines to results/plan_profile.jsonl.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stronghold.lab.records.json_lines import append_record, describe_machine
from stronghold.planner.profiled.files import read_profile
from stronghold.planner.profiled.operator_plan import read_operator_plan
from stronghold.planner.profiled.plan_search import search
from stronghold.planner.profiled.predict import predict
from stronghold.planner.profiled.reach import Cluster

RESULTS = Path(__file__).parent.parent / "results" / "plan_profile.jsonl"
MIB = 2**20
MEMORY_BYTES = 28000 * MIB

REPLAYED: dict[str, tuple[float | None, float, int]] = {
    "gpt_350M_mbs8_recomp": (200.71, 200.71294, 14592 + 5120),
    "resnet_500M_mbs64_recomp": (67.13, 66.98608, 16519 + 3432),
    "t5_770M_mbs2_recomp": (None, 322.60502, 23485),
}
"""Of each plan: the seconds that results/ref has, what Aceso's cost model prints, and MiB."""

SEARCHED: list[tuple[str, int | None, int, int, int, float | None, float | None]] = [
    ("gpt_1_3B", 24, 1, 4, 1024, 101.18, 200),
    ("gpt_2_6B", 32, 1, 8, 1024, 87.36, 200),
    ("gpt_6_7B", 32, 2, 8, 1024, 87.32, 201),
    ("gpt_13B", 40, 4, 8, 1024, 84.61, 201),
    ("resnet_2B", None, 1, 4, 1536, 49.33, 111),
    ("resnet_4B", None, 1, 8, 1536, 56.52, 206),
    ("resnet_6_8B", None, 2, 8, 1536, 45.67, 208),
    ("resnet_13B", None, 4, 8, 1536, 47.60, 225),
    ("t5_3B", 24, 1, 4, 1024, 161.92, 200.66),
    ("t5_6B", 24, 1, 8, 1024, 167.50, 204.56),
    ("t5_11B", 24, 2, 8, 1024, None, None),
    ("t5_11B", 48, 4, 8, 1024, None, None),
]
"""Model, layers, nodes, devices in each, batch, and the seconds of Aceso's step and of its search."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", type=Path, metavar="DIR", help="the profiles")
    parser.add_argument("--plans", type=Path, metavar="DIR", help="the plans for one device")
    parser.add_argument("--only", metavar="NAME", help="search for models of this name alone")
    arguments = parser.parse_args()
    console, described = Console(width=150), describe_machine()
    if arguments.plans is not None:
        table = Table("plan", "published", "its model", "ours", "off", "MiB", "ours", title="published plans replayed")
        for name in REPLAYED:
            found = _replayed(arguments.profiles, arguments.plans / f"{name}.json", name)
            append_record(RESULTS, {"benchmark": "plan_profile", **found, **described})
            off = f"{found['error']:+.4%}"
            published = "" if found["published_s"] is None else f"{found['published_s']:.2f} s"
            step = f"{found['aceso_s']:.3f} s", f"{found['ours_s']:.3f} s", off
            table.add_row(name, published, *step, f"{found['aceso_mib']}", f"{found['ours_mib']:.0f}")
        console.print(table)
    table = Table(
        "model", "devices", "Aceso", "ours", "shorter", "its search", "ours", "stages", title="plans searched"
    )
    for case in SEARCHED:
        if arguments.only in (None, case[0]):
            found = _searched(arguments.profiles, *case)
            append_record(RESULTS, {"benchmark": "plan_profile", **found, **described})
            known = found["aceso_s"] is not None
            table.add_row(
                f"{found['model']}, {found['layers']} layers" if found["layers"] else found["model"],
                f"{found['nodes']} x {found['devices_per_node']}",
                f"{found['aceso_s']:.2f} s" if known else "",
                f"{found['ours_s']:.2f} s",
                f"{1 - found['ours_s'] / found['aceso_s']:+.1%}" if known else "",
                f"{found['aceso_search_s']:.0f} s" if known else "",
                f"{found['search_s']:.1f} s ({found['search_cpu_s']:.1f} of CPU)",
                " ".join(map(str, found["stage_devices"])),
            )
    console.print(table)


def _replayed(profiles: Path, path: Path, name: str) -> dict[str, Any]:
    published_s, aceso_s, aceso_mib = REPLAYED[name]
    plan = read_operator_plan(path)
    profile = read_profile(profiles, plan.model, None if plan.model.startswith("resnet") else plan.layers)
    prediction = predict(profile, plan, 1)
    return {
        "case": "replay",
        "plan": name,
        "published_s": published_s,
        "aceso_s": aceso_s,
        "ours_s": prediction.step_s,
        "error": prediction.step_s / aceso_s - 1,
        "aceso_mib": aceso_mib,
        "ours_mib": prediction.device_bytes / MIB,
    }


def _searched(
    profiles: Path,
    model: str,
    layers: int | None,
    nodes: int,
    devices_per_node: int,
    batch: int,
    aceso_s: float | None,
    aceso_search_s: float | None,
) -> dict[str, Any]:
    began, began_cpu = time.perf_counter(), time.process_time()
    profile = read_profile(profiles, model, layers)
    cluster = Cluster(nodes=nodes, devices_per_node=devices_per_node)
    found = search(profile, cluster, batch=batch, memory_bytes=MEMORY_BYTES)
    taken, taken_cpu = time.perf_counter() - began, time.process_time() - began_cpu
    # The prediction that counts is that of the finished plan, with all its recomputed operators.
    prediction = predict(profile, found.plan, devices_per_node)
    assert prediction.device_bytes <= MEMORY_BYTES
    return {
        "case": "search",
        "model": model,
        "layers": layers,
        "nodes": nodes,
        "devices_per_node": devices_per_node,
        "batch": batch,
        "memory_bytes": MEMORY_BYTES,
        "aceso_s": aceso_s,
        "ours_s": prediction.step_s,
        "aceso_search_s": aceso_search_s,
        "search_s": taken,
        "search_cpu_s": taken_cpu,
        "micro_batch": found.plan.micro_batch,
        "stage_devices": [stage.devices for stage in found.plan.stages],
        "device_bytes": prediction.device_bytes,
    }


if __name__ == "__main__":
    main()
