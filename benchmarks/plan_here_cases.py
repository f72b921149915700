"""The models of plan_here.py, plan_choice.py and tensor_heap.py; planned, and then trained as planned."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import stronghold
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.planner.machine_file import MachineFile

WARM_UP, LEAST_STEPS, LEAST_S = 2, 5, 2.0
SHARE_IN_MEMORY = 0.6
"""Over a disk, the process may take so much of what the model would take in memory."""


@dataclass(frozen=True)
class Case:
    """A model with a batch, of which a step accumulates so many; ``on_disk`` has too little memory for it."""

    model: Callable[[], nn.Module]
    inputs: dict[str, Tensor]
    dtype: torch.dtype
    on_disk: bool = False
    accumulate: int = 1


class Mlp(nn.Module):
    """Residual blocks of two linear layers each, with their mean square as the loss."""

    def __init__(self, layers: int, width: int, inner: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.float().pow(2).mean()


def _gpt(batch: int, sequence: int, *, layers: int = 6, hidden: int = 640, **others: Any) -> Case:
    config = GPTConfig(layers=layers, hidden=hidden, heads=hidden // 64, sequence=sequence, vocabulary=8000)
    ids = torch.zeros((batch, sequence), dtype=torch.int64)
    return Case(lambda: GPT(config), {"input_ids": ids, "labels": ids}, **others)


def _llama(batch: int, sequence: int, *, layers: int = 6, hidden: int = 576, **others: Any) -> Case:
    def model() -> nn.Module:
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(
            vocab_size=6000,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 192,
            use_cache=False,
        )
        return AutoModelForCausalLM.from_config(config).train()

    ids = torch.zeros((batch, sequence), dtype=torch.int64)
    return Case(model, {"input_ids": ids, "labels": ids}, **others)


def _mlp(batch: int, *, layers: int = 8, width: int = 896, inner: int = 2688, **others: Any) -> Case:
    return Case(lambda: Mlp(layers, width, inner), {"x": torch.ones((batch, width), dtype=others["dtype"])}, **others)


FP32, BF16 = torch.float32, torch.bfloat16
CASES: dict[str, Case] = {
    "gpt fp32 ram small": _gpt(1, 96, dtype=FP32),
    "gpt fp32 ram large": _gpt(6, 320, dtype=FP32),
    "gpt bf16 ram large": _gpt(6, 320, dtype=BF16),
    "gpt fp32 disk small": _gpt(1, 96, layers=10, dtype=FP32, on_disk=True),
    "gpt fp32 disk large": _gpt(4, 320, layers=10, dtype=FP32, on_disk=True),
    "llama fp32 ram small": _llama(1, 160, dtype=FP32),
    "llama bf16 ram large": _llama(5, 384, dtype=BF16),
    "llama bf16 disk small": _llama(1, 160, layers=12, dtype=BF16, on_disk=True),
    "llama fp32 disk large": _llama(4, 384, layers=10, dtype=FP32, on_disk=True),
    "mlp fp32 ram small": _mlp(40, dtype=FP32),
    "mlp fp32 ram large": _mlp(1500, dtype=FP32),
    "mlp bf16 ram large": _mlp(1500, dtype=BF16),
    "mlp fp32 disk small": _mlp(40, dtype=FP32, on_disk=True),
    "gpt bf16 ram three": _gpt(2, 256, dtype=BF16, accumulate=3),
    "mlp fp32 disk three": _mlp(300, layers=16, dtype=FP32, on_disk=True, accumulate=3),
    "mlp bf16 disk large": _mlp(1500, layers=12, dtype=BF16, on_disk=True),
}


def in_a_process(module: str, *arguments: str) -> dict[str, Any]:
    """Returns what ``python -m module arguments`` prints last, which is JSON. Raises RuntimeError where it fails."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} has failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(name: str, machine: str, folder: str) -> dict[str, Any]:
    """Plans the case and trains it as planned; returns what was planned and what was measured."""
    case = CASES[name]
    with asked(case, machine, folder) as (empty, settings):
        plan = stronghold.plan(empty, **settings)
        measured = trained(case, plan)
    return {
        "planned_s": plan.step_s.likely,
        "planned_low_s": plan.step_s.low,
        "planned_high_s": plan.step_s.high,
        "planned_bytes": plan.host_bytes,
        "longest": plan.longest,
        "busy_s": dict(plan.busy_s),
        "waits_s": dict(plan.waits_s),
        "settings": {key: value for key, value in plan.settings.items() if key != "store"},
        "store": "disk" if "store" in plan.settings else "ram",
        **measured,
    }


@contextmanager
def asked(case: Case, machine: str, folder: str) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """Yields the case's model on the meta device and what a plan of it is asked with; a store is there as long."""
    with torch.device("meta"):
        empty = case.model()
    settings: dict[str, Any] = {
        "machine": machine,
        "inputs": case.inputs,
        "dtype": case.dtype,
        "accumulate": case.accumulate,
    }
    with tempfile.TemporaryDirectory(prefix="store-", dir=folder) as store:
        if case.on_disk:
            in_memory = stronghold.plan(empty, **settings)
            room = SHARE_IN_MEMORY * (in_memory.host_bytes - in_memory.process_bytes)
            settings |= {"store": store, "host_memory": int(in_memory.process_bytes + room)}
            settings["machine"] = _with_disk(machine, folder, store)
        yield empty, settings


def _with_disk(machine: str, folder: str, store: str) -> MachineFile:
    """Returns the machine with the store's directory as fast as the folder that it is in, which was measured.

    A machine that was measured before has another folder there, on the same disk. Raises ValueError where it has none,
    or several.
    """
    found = MachineFile.read(machine)
    measured = found.disks.get(os.path.realpath(folder)) or (
        next(iter(found.disks.values())) if len(found.disks) == 1 else None
    )
    if measured is None:
        raise ValueError(
            "a machine for cases over a disk must have one directory measured (got "
            f"{', '.join(sorted(found.disks)) or 'none'} in {machine}); make it by stronghold probe --disk "
            f"{os.path.dirname(os.path.realpath(folder))}"
        )
    return replace(found, disks={os.path.realpath(store): measured})


def trained(case: Case, plan: Any, *, least_steps: int = LEAST_STEPS, least_s: float = LEAST_S) -> dict[str, Any]:
    """Trains with the plan's settings: seconds of a step, and the most that the process had in memory meanwhile."""
    torch.manual_seed(0)
    model = stronghold.offload(case.model(), device="cpu", dtype=case.dtype, **plan.settings)
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-5, **plan.optimizer)
    taken: list[float] = []
    begin_s = last_s = time.perf_counter()
    while len(taken) < WARM_UP + least_steps or last_s < begin_s + least_s:
        for _ in range(case.accumulate):
            _loss(model(**case.inputs)).backward()  # the logits are the model's alone
        optimizer.step()
        optimizer.zero_grad()
        now_s = time.perf_counter()
        taken.append(now_s - last_s)
        last_s = now_s
        if len(taken) == WARM_UP:
            reset_peak()
            begin_s = now_s
    report = stronghold.report(model)
    stronghold.close(model)
    counted = sorted(taken[WARM_UP:])
    return {
        "measured_s": statistics.median(counted),
        "least_s": counted[0],
        "steps": len(counted),
        "peak_bytes": peak_bytes(),
        "measured_waits_s": {name: getattr(report.step, f"{name}_wait_s") for name in ("fetch", "update", "disk")},
    }


def _loss(out: Any) -> Tensor:
    loss: Tensor = out if isinstance(out, Tensor) else out.loss
    return loss


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))
