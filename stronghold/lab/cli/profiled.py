"""`stronghold plan --profile`: a plan over operators, from the times and bytes that somebody else has measured."""

from __future__ import annotations

import argparse
import glob
import os
from typing import TYPE_CHECKING

from stronghold.lab.cli.adapter_arguments import ADAPTER_DEFAULTS
from stronghold.lab.cli.shared_arguments import Group, given_shape, path, source, whole

if TYPE_CHECKING:
    from stronghold.planner.profiled.operator_plan import OperatorPlan
    from stronghold.planner.profiled.reach import Cluster

BATCH = 4
"""Samples of a step, where none are given."""
_UNUSED = (
    *("machine", "card", "device", "host_memory", "disk", "window", "resident", "micro_batch", "activations", "update"),
    *("picture", "processes", "cores", "experts_per_part", "accumulate", "seq"),
    *("dtype", "states", "optimizer", "tokens"),
    *ADAPTER_DEFAULTS,
)
"""Arguments of the command that say nothing of such a plan."""


def add_profile(profile: Group) -> None:
    """Adds the arguments of such a plan; the model's name, its layers, the batch and the memory are the command's."""
    profile.add_argument(
        "--profile",
        type=path,
        metavar="DIR",
        help="operators' times and bytes in Aceso's format; MODEL is then a name in it, such as gpt_1_3B",
    )
    profile.add_argument("--nodes", type=whole, metavar="N", help="of equal devices (default: 1)")
    profile.add_argument("--devices-per-node", type=whole, metavar="N", help="in each (default: 1)")
    profile.add_argument("--replay", type=source, metavar="FILE", help="say what this plan takes, and do not search")


def check_no_profile(options: argparse.Namespace) -> None:
    """Raises ValueError for arguments that say nothing without a profile."""
    given = [name for name in ("nodes", "devices_per_node", "replay") if getattr(options, name) is not None]
    if given:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"many devices are planned for from a profile (got {names} without --profile); pass both")


def run_profiled(options: argparse.Namespace) -> int:
    """Plans from ``options.profile``, prints the table, and writes the plan if asked to.

    Raises ValueError for arguments that say nothing here, a profile or a plan that cannot be read, BudgetError where
    nothing fits, OSError for a file that cannot be written.
    """
    from stronghold.lab.outputs import check_apart, check_file, plain_console
    from stronghold.planner.profiled.files import models_in, read_profile
    from stronghold.planner.profiled.operator_plan import read_operator_plan
    from stronghold.planner.profiled.plan_search import search
    from stronghold.planner.profiled.predict import predict
    from stronghold.planner.profiled.reach import Cluster
    from stronghold.planner.profiled.shown import PlannedOperators
    from stronghold.units import format_bytes, parse_bytes

    shape = given_shape(options)
    unused = [name for name in _UNUSED if getattr(options, name) is not None] + [
        key for key in shape if key != "layers"
    ]
    if unused:
        names = ", ".join("--" + name.replace("_", "-") for name in unused)
        raise ValueError(f"a plan from a profile is over operators alone (got {names}); leave that out")
    if options.model is None or options.device_memory is None:
        missing = "MODEL" if options.model is None else "--device-memory"
        raise ValueError(
            f"a plan from a profile must have a model and the memory of a device (got no {missing}); "
            f"{options.profile} has {', '.join(models_in(options.profile)) or 'none'}"
        )
    if options.output is not None:
        check_file("output", options.output)
    tables = os.path.join(glob.escape(options.profile), "*.csv")
    check_apart([("--output", options.output)], inputs=[("--profile", tables), ("--replay", options.replay)])
    profile = read_profile(options.profile, options.model, shape.get("layers"))
    cluster = Cluster(
        nodes=1 if options.nodes is None else options.nodes,
        devices_per_node=1 if options.devices_per_node is None else options.devices_per_node,
    )
    memory_bytes = parse_bytes(options.device_memory)
    if options.replay is None:
        found = search(profile, cluster, batch=options.batch or BATCH, memory_bytes=memory_bytes)
        plan, prediction = found.plan, found.prediction
    else:
        plan = read_operator_plan(options.replay)
        if plan.model != profile.model or plan.devices != cluster.devices:
            raise ValueError(
                f"a plan must be for the model and the devices that are given (got one of {plan.model} on "
                f"{plan.devices} devices, for {profile.model} on {cluster.devices}); pass what it was made for"
            )
        _check_within_nodes(plan, cluster)
        if options.batch not in (None, plan.batch):
            raise ValueError(
                f"a plan is for the samples that it was made for (got --batch {options.batch}, a plan for "
                f"{plan.batch}); leave --batch out, or search without --replay"
            )
        prediction = predict(profile, plan, cluster.devices_per_node)
    console = plain_console()
    console.print(
        PlannedOperators(profile=profile, cluster=cluster, plan=plan, prediction=prediction, memory_bytes=memory_bytes)
    )
    if prediction.device_bytes > memory_bytes:
        console.print(
            f"it needs {format_bytes(round(prediction.device_bytes))} on a device, which is more than there is"
        )
    if options.output is not None:
        plan.write(options.output, predicted_step_s=prediction.step_s)
        console.print(f"{options.output}: the plan", soft_wrap=True)
    return 0


def _check_within_nodes(plan: OperatorPlan, cluster: Cluster) -> None:
    """Raises ValueError where a stage of a plan is not within a node."""
    begin = 0
    for number, stage in enumerate(plan.stages):
        if begin % cluster.devices_per_node + stage.devices > cluster.devices_per_node:
            raise ValueError(
                f"each stage must be within a node (got stage {number} of the plan on {stage.devices} devices, the "
                f"first of them number {begin}, with --devices-per-node {cluster.devices_per_node}); pass what the "
                "plan was made for"
            )
        begin += stage.devices
