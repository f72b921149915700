"""How near a step of the Triton kernel's AdamW comes to the host kernel's and to float64, in many settings.

    python benchmarks/adamw_triton.py [--elements 1Mi]         # in Triton's interpreter, on the CPU
    python benchmarks/adamw_triton.py --device cuda

One step on numbers of many magnitudes, from the same weights, gradients and moments, by both kernels, and by
torch.optim.AdamW in fp32 for comparison. Told are how many of the Triton kernel's results are not the host's, and the
largest distances: in units of the last place (ulp), of a second moment its own, of a first moment that of its larger
term, of a weight that of itself or of its update before such terms cancel, whichever is larger. Every bit should be the
host's.

Appends one JSON line for each setting to results/adamw_triton.jsonl. The interpreter's fma must round once, as that of
Triton 3.9 does.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adamw import parse_count
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from stronghold import native
from stronghold.lab.records.json_lines import append_record, describe_machine
from stronghold.native import BLOCK, Blocks, Segment
from stronghold.split import join, split

RESULTS = Path(__file__).parent.parent / "results" / "adamw_triton.jsonl"
INTERPRETED_ROWS = 4096
"""The most blocks that an interpreted program updates: an operation takes as long for few of them."""
SETTINGS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
CHANGES: tuple[dict[str, float], ...] = (
    {},
    {"beta2": 0.95},
    {"weight_decay": 0.0},
    {"grad_scale": 0.37},
    {"lr": 0.3, "weight_decay": 0.5, "beta1": 0.5, "beta2": 0.95},
    {"beta1": 0.0},
    {"eps": 1e-2},
)
HALVES = "bf16 and remainder"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One step: the formats of weights, gradients and moments, and what differs from SETTINGS."""

    weight: str = "fp32"
    grad: str = "fp32"
    states: str = "fp32"
    step: int = 7
    change: dict[str, float] = field(default_factory=dict)


def settings() -> Iterator[Setting]:
    """Yields each of CHANGES with both formats of weights, and each format of gradients; all with both of moments."""
    for states in ("fp32", "8bit"):
        for weight in ("fp32", HALVES):
            for change in CHANGES:
                yield Setting(weight=weight, states=states, change=change)
            for grad in ("fp32", "bf16", HALVES):
                yield Setting(weight=weight, grad=grad, states=states, step=3, change={"grad_scale": 0.37})


# ---- one step ----


def begin(setting: Setting, elements: int) -> Segment:
    """Returns what a step begins with; 8-bit moments are those of a step before."""
    generator = torch.Generator().manual_seed(0)

    def spread(scale: float) -> Tensor:
        values = torch.randn(elements, generator=generator) * scale
        values *= 10 ** (torch.rand(elements, generator=generator) * 6 - 5)
        return torch.where(torch.rand(elements, generator=generator) < 0.02, 0.0, values)

    def stored(name: str, kind: str, values: Tensor) -> dict[str, Tensor | None]:
        remainder = "remainder" if name == "weight" else "grad_remainder"
        if kind != HALVES:
            return {name: values.bfloat16() if kind == "bf16" else values}
        high, low = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
        split(values, high, low)
        return {name: high, remainder: low}

    def blank() -> Blocks:
        codes, exponents = (torch.zeros(count, dtype=torch.uint8) for count in (elements, -(-elements // BLOCK)))
        return Blocks(codes=codes, exponents=exponents)

    given: dict[str, Any] = {**stored("weight", setting.weight, spread(1.0)), **SETTINGS, **setting.change}
    before, now = (stored("grad", setting.grad, spread(0.1)) for _ in range(2))
    if setting.states == "fp32":
        return Segment(**given, **now, exp_avg=spread(0.05), exp_avg_sq=spread(0.1).square(), step=setting.step)
    segment = Segment(**given, **before, exp_avg=blank(), exp_avg_sq=blank(), step=setting.step - 1)
    native.adamw([segment], threads=1)
    return replace(segment, **now, step=setting.step)


def copy_of(segment: Segment, device: str = "cpu") -> Segment:
    return segment.mapped(lambda tensor: tensor.to(device, copy=True))


def values_of(segment: Segment) -> dict[str, Tensor]:
    """Returns what a step changed: weights and moments in fp32, and of 8-bit moments codes and exponents."""
    found = {"weight": _joined(segment.weight, segment.remainder)}
    for name in ("exp_avg", "exp_avg_sq"):
        moment = getattr(segment, name)
        if isinstance(moment, Blocks):
            found |= {f"{name}_codes": moment.codes, f"{name}_exponents": moment.exponents}
        else:
            found[name] = moment
    return {name: tensor.cpu() for name, tensor in found.items()}


def _joined(tensor: Tensor, remainder: Tensor | None) -> Tensor:
    return tensor.float() if remainder is None else join(tensor, remainder)


def exact(s: Segment) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the new weights and fp32 moments in float64, each with the number whose last place is its unit."""
    assert isinstance(s.exp_avg, Tensor) and isinstance(s.exp_avg_sq, Tensor)
    g = _joined(s.grad, s.grad_remainder).double().numpy() * s.grad_scale
    terms = np.stack([s.beta1 * s.exp_avg.double().numpy(), (1 - s.beta1) * g])
    m, larger = terms.sum(axis=0), np.abs(terms).max(axis=0)
    v = s.beta2 * s.exp_avg_sq.double().numpy() + (1 - s.beta2) * g * g
    kept = _joined(s.weight, s.remainder).double().numpy() * (1 - s.lr * s.weight_decay)
    denominator = np.sqrt(v) / math.sqrt(1 - s.beta2**s.step) + s.eps
    rate = s.lr / (1 - s.beta1**s.step) / denominator
    w = kept - rate * m
    unit = np.max(np.abs([w, kept, rate * m, rate * larger]), axis=0)
    return {"weight": (w, unit), "exp_avg": (m, larger), "exp_avg_sq": (v, v)}


def by_torch(s: Segment) -> dict[str, Tensor]:
    """Returns what torch.optim.AdamW, in fp32 and without multi-tensor operations, makes of it."""
    assert isinstance(s.exp_avg, Tensor) and isinstance(s.exp_avg_sq, Tensor)
    found = {
        "weight": _joined(s.weight, s.remainder).clone(),
        "exp_avg": s.exp_avg.clone(),
        "exp_avg_sq": s.exp_avg_sq.clone(),
    }
    torch_adamw(
        [found["weight"]],
        [_joined(s.grad, s.grad_remainder) * s.grad_scale],
        [found["exp_avg"]],
        [found["exp_avg_sq"]],
        [],
        [torch.tensor(float(s.step - 1))],
        foreach=False,
        amsgrad=False,
        beta1=s.beta1,
        beta2=s.beta2,
        lr=s.lr,
        weight_decay=s.weight_decay,
        eps=s.eps,
        maximize=False,
    )
    return found


def ulps(got: Tensor, expected: np.ndarray, unit_of: np.ndarray) -> float:
    """Returns the largest distance in the units of ``unit_of``; NaN where one is not finite."""
    unit = np.spacing(np.abs(unit_of).astype(np.float32)).astype(np.float64)
    return float((np.abs(got.double().numpy() - expected) / unit).max())


def measure(setting: Setting, elements: int, device: str, launch: Callable[[Segment], None]) -> dict[str, Any]:
    """Returns what a record tells of one step."""
    before = begin(setting, elements)
    ours, host = copy_of(before, device), copy_of(before)
    launch(ours)
    native.adamw([host], threads=1)
    got, theirs = values_of(ours), values_of(host)
    record: dict[str, Any] = {"differ": {name: int((got[name] != theirs[name]).sum()) for name in got}}
    if setting.states == "fp32":
        units = exact(before)
        by = {"ulp": got, "host_ulp": theirs, "torch_ulp": by_torch(before)}
        for name, values in by.items():
            record[name] = {key: ulps(values[key], *units[key]) for key in units}
        record["ulp_from_host"] = {
            key: ulps(got[key], theirs[key].double().numpy(), unit_of) for key, (_, unit_of) in units.items()
        }
    return record


# ---- the command line ----


def interpreted(elements: int) -> Callable[[Segment], None]:
    """Returns the kernel's launch, in Triton's interpreter. Raises ValueError where its fma rounds twice."""
    os.environ["TRITON_INTERPRET"] = "1"  # read as triton is imported
    from triton.runtime import interpreter

    from stronghold.optim import triton_adamw

    one, tiny = (
        interpreter.TensorHandle(np.float32([value]), interpreter.tl.float32) for value in (1 + 2**-12, -1 - 2**-11)
    )
    if interpreter.interpreter_builder.create_fma(one, one, tiny).data != 2.0**-24:
        raise ValueError(
            "the fma of Triton's interpreter must round once (got one that rounds twice); pip install 'triton>=3.9'"
        )
    triton_adamw.ROWS = min(INTERPRETED_ROWS, 1 << (elements // BLOCK).bit_length())
    return triton_adamw.launch


def compiled() -> Callable[[Segment], None]:
    from stronghold.optim import triton_adamw

    return triton_adamw.launch


def to_table(records: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="A step of the Triton kernel beside the host's")
    for column in ("moments", "weights", "gradients", "step", "settings", "not the host's: w, m, v"):
        table.add_column(column)
    for column in ("ulp from float64: w, m, v", "the host's", "torch.optim's"):
        table.add_column(column, justify="right")
    for record in records:
        setting = record["setting"]
        row = [setting[name] for name in ("states", "weight", "grad")] + [str(setting["step"])]
        row.append(", ".join(f"{name} {value:g}" for name, value in setting["change"].items()))
        row.append("  ".join(f"{count:,}" for count in record["differ"].values()))
        told = (record.get(name, {}) for name in ("ulp", "host_ulp", "torch_ulp"))
        table.add_row(*row, *("  ".join(f"{value:.3f}" for value in values.values()) for values in told))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=parse_count, default="1Mi", metavar="COUNT", help="default: 1Mi")
    parser.add_argument("--device", default="cpu", help="of the kernel; on the CPU it is interpreted (default: cpu)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help=f"JSON lines ({RESULTS})")
    options = parser.parse_args(argv)
    console = Console(width=max(Console().width, 170))
    try:
        launch = interpreted(options.elements) if options.device == "cpu" else compiled()
    except ValueError as error:
        parser.error(str(error))
    machine, records = describe_machine(["triton", "numpy"]), []
    with np.errstate(all="ignore"):  # what an interpreted program computes beyond the last element
        for setting in settings():
            record = {"benchmark": "adamw_triton", "setting": asdict(setting), "elements": options.elements}
            record |= {"device": options.device, "isa": native.best_isa()}
            records.append(record | measure(setting, options.elements, options.device, launch))
            append_record(options.out, records[-1] | machine)
    console.print(to_table(records))
    differ = sum(sum(record["differ"].values()) for record in records)
    console.print(f"{differ} numbers are not the host's. Recorded in {options.out}.")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
