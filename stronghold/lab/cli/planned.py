"""What `stronghold train` takes from a plan, and what an argument is that neither it nor the user says."""

import argparse
from typing import Any

from stronghold.lab.outputs import check_apart
from stronghold.planner.training_plan import TrainingPlan

DEFAULTS: dict[str, Any] = {
    "batch": 4,
    "seq": 1024,
    "dtype": "fp32",
    "device": None,
    "window": "auto",
    "resident": 0,
    "store": "ram",
    "activations": "recompute",
    "micro_batch": None,
    "device_memory": None,
    "host_memory": None,
    "states": "fp32",
    "update": None,
    "stages": 1,
    "replicas": 1,
    "micro_batches": None,
    "schedule": None,
    "balance": "layers",
}
"""The arguments that a plan has an answer to, which the parser leaves None where they are not given."""
_OF_PROCESSES = ("stages", "replicas", "micro_batches", "schedule", "balance")
"""Those of them that follow from the number of processes."""


def settle(options: argparse.Namespace) -> None:
    """Gives each of those arguments its value: the user's, the plan's, or else the default; ``plan`` becomes the plan.

    Raises ValueError for a plan that cannot be read, one that the run would write over, one beside an argument that
    says otherwise, or one for a run that it is not of.
    """
    said, file = dict[str, Any](), options.plan
    if file is not None:
        check_apart([("--log", options.log), ("--record", options.record)], inputs=[("--plan", file)])
        try:
            plan = options.plan = TrainingPlan.read(file)
        except OSError as error:
            raise ValueError(
                f"--plan must be a file that stronghold plan -o wrote (got {file!r}: {error.strerror}); plan first"
            ) from error
        if options.method != "stronghold":
            raise ValueError(
                f"a plan is of method stronghold (got --plan with --method {options.method}); leave out one or the "
                "other"
            )
        if plan.updated_by != "AdamW":
            raise ValueError(
                f"stronghold train updates by AdamW (got {file}, a plan for {plan.updated_by}); train by it in Python: "
                f"offload(model, plan={file!r}), or plan for AdamW: stronghold plan --optimizer adamw -o {file}"
            )
        if plan.experts_per_part is not None:
            raise ValueError(
                f"stronghold train has whole layers in its window (got {file}, a plan with parts of "
                f"{plan.experts_per_part} experts); train by it in Python: offload(model, plan={file!r})"
            )
        if plan.accumulate > 1:
            call = f"offload(model, plan={file!r})" if plan.processes == 1 else "replicate(model, **plan.settings)"
            raise ValueError(
                f"stronghold train has one batch in a step (got {file}, a plan of steps that accumulate "
                f"{plan.accumulate}); train by it in Python, {call}, or leave out --accumulate"
            )
        said = _said(plan)
    for name, default in DEFAULTS.items():
        given, planned = getattr(options, name), said.get(name, default)
        if file is not None and given is not None and given != planned:
            flag = "--" + name.replace("_", "-")
            again = "--processes N" if name in _OF_PROCESSES else f"{flag} {given}"
            raise ValueError(
                f"a plan holds for its own settings (got {file} with {flag} {planned}, and {flag} {given}); leave "
                f"out {flag}, or plan with it: stronghold plan {again} -o {file}"
            )
        setattr(options, name, planned if given is None else given)


def _said(plan: TrainingPlan) -> dict[str, Any]:
    settings = dict(plan.settings)
    if isinstance(store := settings.get("store"), list):  # as OffloadSettings has it
        settings["store"] = store[0] if len(store) == 1 else tuple(store)
    parallel = dict(plan.parallel)
    if isinstance(parallel.get("balance"), list):
        parallel["balance"] = tuple(parallel["balance"])
    return {
        **settings,
        **parallel,
        **plan.optimizer,
        "batch": plan.samples,
        "seq": plan.tokens // plan.samples,
        "dtype": {"float32": "fp32", "bfloat16": "bf16"}[plan.dtype],
        "device": plan.device,
    }
