"""From what was measured of a machine to the rates that the step model asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from stronghold.planner.host_work import host_work_of
from stronghold.planner.machine_file import BESIDE_COMPUTE, PROCESSES, MachineFile, Spread
from stronghold.planner.op_costs import OpRates, Rate, imbalance
from stronghold.planner.step_bytes import MUON
from stronghold.planner.step_costs import CORES_ARE_ONE, DEVICE_IS_ONE, LINK_UP_IS_ONE, Machine, Resource

Pace = Literal["slow", "likely", "fast"]
"""Which of what was measured: the quartile that makes a step longer, the median, or the one that makes it shorter."""

ADDED_BYTES = {"float32": 12, "bfloat16": 10}
"""What adding an element of a gradient to the sum of those before reads and writes: of bf16 the sum's low half, too."""
UPDATED_BYTES = {
    ("float32", "fp32"): 28,
    ("bfloat16", "fp32"): 26,
    ("float32", "8bit"): 16,
    ("bfloat16", "8bit"): 14,
}
"""The same of AdamW's update, by weights and moments, of one pass's gradients."""
_LOW_HALF_BYTES = 2


def op_rates(machine: MachineFile, pace: Pace = "likely", processes: int = 1) -> OpRates:
    """Returns what operators take on the machine's device, of which so many ``processes`` compute at the same time."""
    flop_per_s: dict[tuple[str, str], list[Rate]] = {}
    for product in machine.matmul:
        rates = flop_per_s.setdefault(("matmul", product.dtype), [])
        rates.append(Rate(tuple(product.sizes), _rate(product.flop_per_s, pace)))
    for one in machine.attention:
        batch, heads, *_ = one.sizes
        unevenly = imbalance(batch * heads, machine.computing_threads) if machine.is_host else 1.0
        for kind, measured, held_up in (
            ("attention", one.forward_flop_per_s, 1.0),
            ("attention backward", one.backward_flop_per_s, unevenly),
        ):
            rate = Rate(tuple(one.sizes), held_up * _rate(measured, pace))
            flop_per_s.setdefault((kind, one.dtype), []).append(rate)
    moved = {
        "other": machine.elementwise,
        "cached": machine.elementwise_cached,
        "transcendental": machine.transcendental,
    }
    for dtype in sorted({one.dtype for one in machine.matmul}):  # a type that was not measured takes as long as another
        flop_per_s.setdefault(("matmul", ""), flop_per_s["matmul", dtype])
    return OpRates(
        flop_per_s=flop_per_s,
        bytes_per_s={
            _kind(kind, name): _rate(one, pace) for kind, found in moved.items() for name, one in found.items()
        },
        cache_bytes=machine.cache_bytes,
        op_s=_time(machine.op_s, pace),
        is_host=machine.is_host,
        threads=machine.computing_threads,
        processes=processes,
    )


def _kind(kind: str, name: str) -> tuple[str, str]:
    """Returns the kind and the dtype of operators that are measured under ``name``: a dtype, or with a function."""
    dtype, _, function = name.partition(" ")
    return f"{kind} {function}" if function else kind, dtype


def machine_of(
    machine: MachineFile,
    *,
    dtype: str,
    states: str,
    directories: Sequence[str] = (),
    layer_ops: float = 0.0,
    adds: bool = False,
    pace: Pace = "likely",
) -> Machine:
    """Returns what the step model asks for of a machine that was measured.

    ``dtype`` is that in which layers compute and ``states`` the format of the optimizer's moments. Muon's updates on
    the host move as many bytes as AdamW's with moments in fp32, and take as long where they were not measured.
    ``directories`` are those of the store, which layers are dealt out over, and ``layer_ops`` how many operators a
    layer's computation issues. With ``adds`` gradients are sums, of which an update in bf16 reads the low halves, too.

    Raises ValueError for what was not measured.
    """
    _check_disks(machine, directories)
    link, muon_form = machine.link, update_form(machine, dtype, states)
    form = f"{dtype}+fp32" if states == MUON else muon_form  # of all that AdamW updates
    alone, beside = (_time(_update(machine, form)[name], pace) for name in ("alone", "beside_compute"))
    updated_bytes = UPDATED_BYTES.get((dtype, "fp32" if states == MUON else states))
    moved = 1 + _LOW_HALF_BYTES / updated_bytes if adds and dtype == "bfloat16" and updated_bytes else 1.0
    slowed = dict(LINK_UP_IS_ONE)
    for (one, other), measured, under in (
        ((Resource.FETCHES, Resource.GRADIENTS), link["h2d"], link["h2d_beside_d2h"]),
        ((Resource.GRADIENTS, Resource.FETCHES), link["d2h"], link["d2h_beside_h2d"]),
    ):
        slowed[one, other] = max(1.0, measured.likely / under.likely)
    if machine.is_host:
        slowed |= CORES_ARE_ONE
    else:
        slowed[Resource.UPDATES, Resource.COMPUTE] = max(1.0, beside / alone)
        slowed[Resource.COMPUTE, Resource.UPDATES] = max(1.0, machine.compute_beside_update.likely)
    if states == MUON:
        slowed |= DEVICE_IS_ONE
    disks = [machine.disks[path] for path in directories]
    for name, one, other in zip(
        BESIDE_COMPUTE, (Resource.COMPUTE, Resource.DISK), (Resource.DISK, Resource.COMPUTE), strict=True
    ):
        slowed[one, other] = max([1.0, *(disk[name].likely for disk in disks if name in disk)])
    if machine.is_host:  # updates, too, share the cores with the disks' threads
        slowed[Resource.UPDATES, Resource.DISK] = slowed[Resource.COMPUTE, Resource.DISK]
    # Where the thread that issues computes, too, each operator's time has it.
    launch_s = layer_ops * _time(machine.launch_s, pace) if machine.runs_behind else 0.0
    muon_ns = _time(_update(machine, muon_form)["alone"], pace) if muon_form != form else None
    on_device, muon_on_device = (machine.device_update_ns.get(name) for name in (form, muon_form))
    return Machine(
        h2d_bytes_per_s=_rate(link["h2d"], pace),
        d2h_bytes_per_s=_rate(link["d2h"], pace),
        copy_s=_time(link["copy_s"], pace),
        host_update_ns=moved * alone,
        host_add_ns=alone * ADDED_BYTES[dtype] / updated_bytes if updated_bytes else alone,
        device_update_ns=moved * (alone if on_device is None else _time(on_device, pace)),
        muon_host_ns=None if muon_ns is None else moved * muon_ns,
        muon_device_ns=muon_ns if muon_ns is None or muon_on_device is None else _time(muon_on_device, pace),
        launch_s=launch_s,
        host_work=host_work_of(0.0 if machine.host_call_s is None else _time(machine.host_call_s, pace)),
        runs_behind=machine.runs_behind,
        iterates_beside=not machine.is_host,
        disk_read_bytes_per_s=_disk(machine, directories, "read", pace),
        disk_write_bytes_per_s=_disk(machine, directories, "write", pace),
        slowed=slowed,
    )


def update_form(machine: MachineFile, dtype: str, states: str) -> str:
    """Returns the name of the measured updates that stand for those of weights in ``dtype`` with such states."""
    form = f"{dtype}+{states}"
    return f"{dtype}+fp32" if states == MUON and form not in machine.host_update_ns else form


def carried_s(machine: MachineFile, pace: Pace, length_bytes: int, copies: int) -> float:
    """Returns what so many bytes take to the device and back, in so many copies each way."""
    link = machine.link
    ways_s = sum(length_bytes / _rate(link[way], pace) for way in ("h2d", "d2h"))
    return ways_s + 2 * copies * _time(link["copy_s"], pace)


def messages_s(machine: MachineFile | None, message_bytes: Sequence[int]) -> list[float]:
    """Returns what messages of so many bytes take from a process to another: no time where that was not measured."""
    rates = message_rates(machine)
    return [rates["message_s"] + count / rates["bytes_per_s"] for count in message_bytes]


def message_rates(machine: MachineFile | None) -> dict[str, float]:
    """Returns the seconds of a small message between processes, and what large ones sustain, by their names."""
    if machine is None or not machine.processes:
        return {"message_s": 0.0, "bytes_per_s": math.inf}
    return {name: machine.processes[name].likely for name in PROCESSES}


def _update(machine: MachineFile, form: str) -> dict[str, Spread]:
    if form not in machine.host_update_ns:
        raise ValueError(
            f"the machine must have the time of an update in {form} (got {sorted(machine.host_update_ns)}); probe it "
            "again: stronghold probe -o machine.json"
        )
    return dict(machine.host_update_ns[form])


def _disk(machine: MachineFile, directories: Sequence[str], way: str, pace: Pace) -> float:
    """Returns what all of them together sustain, or infinity where there are none.

    Each has as much of every unit, so that the slowest has them all wait. The step model's disk does one thing at a
    time, and a step's reads and writes are there together: a disk that does both at once faster, or slower, than one
    after the other is that much faster, or slower.
    """
    each = [_mixed(machine.disks[path]) * _rate(machine.disks[path][way], pace) for path in directories]
    return len(each) * min(each) if each else math.inf


def _check_disks(machine: MachineFile, directories: Sequence[str]) -> None:
    if missing := [path for path in directories if path not in machine.disks]:
        raise ValueError(
            f"the machine must have the speed of each directory of the store (got {missing} beside "
            f"{sorted(machine.disks)}); probe it again: stronghold probe --disk {missing[0]} -o machine.json"
        )


def _mixed(disk: Mapping[str, Spread]) -> float:
    """Returns how many times as fast reads and writes at once are as the same one after the other."""
    return (
        disk["read_beside_write"].likely / disk["read"].likely + disk["write_beside_read"].likely / disk["write"].likely
    )


def _rate(measured: Spread, pace: Pace) -> float:
    return {"slow": measured.low, "likely": measured.likely, "fast": measured.high}[pace]


def _time(measured: Spread, pace: Pace) -> float:
    return {"slow": measured.high, "likely": measured.likely, "fast": measured.low}[pace]
