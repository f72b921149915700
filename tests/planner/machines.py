"""Machines as files have them, without having been measured."""

from typing import Any

from stronghold.planner.machine_file import Attention, MachineFile, Product, Spread


def about(value: float) -> Spread:
    """Returns a value with a twentieth to either side."""
    return Spread(0.95 * value, value, 1.05 * value)


def machine(**changes: Any) -> MachineFile:
    """Returns a machine with a GPU of 24 GiB and 64 GiB of memory, with what is named changed."""
    link = dict.fromkeys(("h2d", "d2h", "h2d_beside_d2h", "d2h_beside_h2d"), about(25e9))
    rates = {"float32": about(8e11), "bfloat16": about(9e11)}
    settings: dict[str, Any] = {
        "device": "cuda",
        "device_name": "a GPU",
        "is_host": False,
        "runs_behind": True,
        "device_memory_bytes": 24 * 2**30,
        "host_memory_bytes": 64 * 2**30,
        "cores": 16,
        "processor": "a processor",
        "time": "2026-11-24T12:00:00+00:00",
        "versions": {"torch": "2.13.0"},
        "link": {**link, "h2d_pageable": about(8e9), "copy_s": about(8e-6)},
        "matmul": [
            Product(dtype, (size, size, size), about(rate * (1 if size > 1000 else 0.5)))
            for dtype, rate in (("float32", 4e13), ("bfloat16", 1.6e14))
            for size in (512, 4096)
        ],
        "attention": [
            Attention(dtype, (8, 16, length, length, 64), about(rate), about(rate))
            for dtype, rate in (("float32", 2e13), ("bfloat16", 8e13))
            for length in (512, 4096)
        ],
        "elementwise": rates,
        "elementwise_cached": {dtype: about(3 * one.likely) for dtype, one in rates.items()},
        "transcendental": rates,
        "cache_bytes": 40 * 2**20,
        "op_s": about(4e-6),
        "launch_s": about(5e-6),
        "host_update_ns": {
            f"{dtype}+{states}": {"alone": about(ns), "beside_compute": about(1.1 * ns)}
            for dtype, states, ns in (
                ("float32", "fp32", 0.5),
                ("float32", "8bit", 0.4),
                ("bfloat16", "fp32", 0.45),
                ("bfloat16", "8bit", 0.35),
            )
        },
        "compute_beside_update": Spread(1.0, 1.02, 1.05),
        "device_update_ns": {f"{dtype}+{states}": about(0.03) for dtype in rates for states in ("fp32", "8bit")},
        "disks": {},
    }
    return MachineFile(**{**settings, **changes})


def laptop(**changes: Any) -> MachineFile:
    """Returns a machine without a GPU."""
    settings: dict[str, Any] = {
        "device": "cpu",
        "device_name": "a processor",
        "is_host": True,
        "runs_behind": False,
        "device_memory_bytes": None,
        "host_memory_bytes": 16 * 2**30,
        "matmul": [
            Product(dtype, (size, size, size), about(1.5e11))
            for dtype in ("float32", "bfloat16")
            for size in (128, 2048)
        ],
        "attention": [Attention("float32", (4, 8, 512, 512, 64), about(8e10), about(6e10))],
        "elementwise": {"float32": about(1.5e10), "bfloat16": about(1.2e10)},
        "elementwise_cached": {"float32": about(6e10), "bfloat16": about(5e10)},
        "transcendental": {"float32": about(5e9), "bfloat16": about(4e9)},
        "cache_bytes": 2**20,
        "device_update_ns": {},
    }
    return machine(**{**settings, **changes})
