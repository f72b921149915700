"""The table of a machine: what was measured, in the units that people know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stronghold.planner.step_bytes import MUON
from stronghold.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from stronghold.planner.machine_file import MachineFile, Product, Spread

Row = tuple[str, str, str]


def machine_rows(machine: MachineFile) -> list[Row]:
    """Returns the lines of a machine's table: (section, name, value)."""
    memory = format_bytes(machine.host_memory_bytes)
    device = machine.device if machine.is_host else f"{machine.device}, {machine.device_name}"
    if machine.device_memory_bytes is not None:
        device += f", {format_bytes(machine.device_memory_bytes)}"
    rows = [
        ("machine", "processor", f"{machine.processor}, {machine.cores} cores, {memory}"),
        ("", "layers compute on", device),
        ("", "measured", f"{machine.time}, torch {machine.versions.get('torch', 'unknown')}"),
    ]
    sections: list[tuple[str, list[tuple[str, str]]]] = [
        ("link", _link(machine)),
        ("matrix products", _products(machine)),
        ("attention", _attention(machine)),
        ("other operators", _others(machine)),
        ("update of a parameter", _updates(machine)),
    ]
    if machine.processes:
        sections.append(("between processes", _processes(machine.processes)))
    sections += [(f"disk {path}", _disk(measured)) for path, measured in machine.disks.items()]
    for section, found in sections:
        rows += [(section if not number else "", *line) for number, line in enumerate(found)]
    return rows


def _link(machine: MachineFile) -> list[tuple[str, str]]:
    link = machine.link
    up, down = ("into slots", "out of slots") if machine.is_host else ("to the device", "from the device")
    return [
        (up, _with_beside(link["h2d"], link["h2d_beside_d2h"], "both ways")),
        (down, _with_beside(link["d2h"], link["d2h_beside_h2d"], "both ways")),
        ("pageable", _rate(link["h2d_pageable"], "B/s")),
        ("a copy of nothing", _seconds(link["copy_s"])),
    ]


def _products(machine: MachineFile) -> list[tuple[str, str]]:
    rows = []
    for dtype in dict.fromkeys(one.dtype for one in machine.matmul):
        found = sorted((one for one in machine.matmul if one.dtype == dtype), key=lambda one: one.flop_per_s.likely)
        rows += [(f"{dtype}, the fastest", _at_size(found[-1])), (f"{dtype}, the slowest", _at_size(found[0]))]
    return rows


def _at_size(one: Product) -> str:
    return f"{_rate(one.flop_per_s, 'FLOP/s')} at {' x '.join(map(str, one.sizes))}"


def _attention(machine: MachineFile) -> list[tuple[str, str]]:
    rows = []
    for dtype in dict.fromkeys(one.dtype for one in machine.attention):
        of = [one for one in machine.attention if one.dtype == dtype]
        best = max(of, key=lambda one: one.forward_flop_per_s.likely)
        rows += [
            (f"{dtype} forward", _rate(best.forward_flop_per_s, "FLOP/s")),
            (f"{dtype} backward", _rate(best.backward_flop_per_s, "FLOP/s")),
        ]
    return rows


def _others(machine: MachineFile) -> list[tuple[str, str]]:
    rows = []
    for dtype, rate in machine.elementwise.items():
        cached, slower = machine.elementwise_cached.get(dtype), machine.transcendental.get(dtype)
        value = _rate(rate, "B/s")
        value += "" if cached is None else f"; in cache {_rate(cached, 'B/s')}"
        rows.append((dtype, value + ("" if slower is None else f"; transcendental {_rate(slower, 'B/s')}")))
    launch = [] if machine.is_host else [("to issue one", _seconds(machine.launch_s))]
    if machine.host_call_s is not None and not machine.is_host:
        launch.append(("one that the host computes", _seconds(machine.host_call_s)))
    least = "to call one" if machine.is_host else "the least that one takes"
    return [*rows, (least, _seconds(machine.op_s)), *launch]


def _updates(machine: MachineFile) -> list[tuple[str, str]]:
    rows = []
    for name, measured in machine.host_update_ns.items():
        value = f"{_ns(measured['alone'])}; beside computing {_ns(measured['beside_compute'])}"
        if (on_device := machine.device_update_ns.get(name)) is not None:
            value += f"; on the device {_ns(on_device)}"
        dtype, _, states = name.partition("+")
        rows.append((f"{dtype}, Muon's momentum" if states == MUON else f"{dtype}, {states} moments", value))
    slowed = machine.compute_beside_update
    return [*rows, ("computing beside updates takes", f"{slowed.likely:.2f} ({slowed.low:.2f} to {slowed.high:.2f})")]


def _processes(measured: Mapping[str, Spread]) -> list[tuple[str, str]]:
    return [("a small message", _seconds(measured["message_s"])), ("large ones", _rate(measured["bytes_per_s"], "B/s"))]


def _disk(measured: Mapping[str, Spread]) -> list[tuple[str, str]]:
    return [
        ("read", _with_beside(measured["read"], measured["read_beside_write"], "beside writes")),
        ("write", _with_beside(measured["write"], measured["write_beside_read"], "beside reads")),
    ]


def _with_beside(alone: Spread, beside: Spread, words: str) -> str:
    return f"{_rate(alone, 'B/s')}; {words} {_rate(beside, 'B/s')}"


def _rate(measured: Spread, unit: str) -> str:
    """Returns a rate like ``25 GB/s (24 to 26)``, by thousands."""
    scale, prefix = next(
        (scale, prefix)
        for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1.0, ""))
        if measured.likely >= scale or scale == 1.0
    )
    low, likely, high = (f"{value / scale:.3g}" for value in measured)
    return f"{likely} {prefix}{unit} ({low} to {high})"


def _ns(measured: Spread) -> str:
    return f"{measured.likely:.3g} ns ({measured.low:.3g} to {measured.high:.3g})"


def _seconds(measured: Spread) -> str:
    low, likely, high = (format_seconds(value) for value in measured)
    return f"{likely} ({low} to {high})"
