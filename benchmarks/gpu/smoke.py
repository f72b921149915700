"""Every mode once, on a small model beside plain PyTorch on the same device: what does not work is known at once.

    python benchmarks/gpu/smoke.py [--only "window 2" "from disk"]

Trains a GPT of six layers for five steps, or a model of transformers, in each mode, and compares every loss with that
of the ordinary loop in the same precision, and how each layer and each parameter of the root has moved: in bf16 the
losses alone do not see layers that are never updated. The modes run in a process of their own: one that dies takes no
other with it, the next process goes on behind it, and one that hangs is ended with a traceback of every thread
(smoke.txt). Appends one JSON line for each mode to smoke.jsonl; what is recorded is not run again. What a mode is
warned of is in its record and in the table: a mode that goes another way than asked says so there. Ends with 1 if a
mode failed or is wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from half_hour import Recorded, add_options, budget_of, draw, end_of, error_of, line_of
from loops import Loop, away, batches_of, offloaded, plain
from rich import box
from rich.table import Table
from smoke_modes import GPT_SHAPE, LLAMA, MODES, QWEN3_MOE, VOCABULARY, Learner, Mode
from torch import Tensor, nn

import stronghold
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.lab.records.agreement import TOLERANCE
from stronghold.lab.records.json_lines import Record
from stronghold.lab.records.trials import exit_reason
from stronghold.units import format_seconds

BATCH, SEQUENCE, STEPS = 4, 64, 5
PATIENCE_S = 60.0
COMPILING = 3
"""How many times as patient it is with a mode that compiles: processes of the compiler's import PyTorch first."""
COMPILED_FOR = ("cpu", "cuda", "xpu")
"""Devices that inductor has code for, and that PyTorch computes attention again on within a graph."""
MOVED = 0.15
"""How far the movement of a layer's parameters, or of a root parameter, may be from plain PyTorch's, relative to it.

What is never updated is 1 away, half a learning rate 0.5, one of the last two updates that is lost 0.16 to 0.22, where
the last one is in no loss at all. Seen on the CPU: in fp32 up to 2e-4, by Muon 5e-3, in bf16 0.05, of the last norm's
128 weights 0.08. Layers are looked at whole: keys' biases, whose gradients are rounding alone, go their own ways.
"""
CONTEXT_LOST = 4
"""What a process of modes ends with behind an error of CUDA, which is recorded: the next goes on behind it."""
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""For a replica of one: the machine's name is not looked up, which without a network may take until it is given up."""

Values = Mapping[str, Tensor]
"""Of what is trained, by name."""


# ---- in a process of its own ----


def run_modes(names: Sequence[str], options: argparse.Namespace) -> bool:
    """Runs the modes called ``names``, each recorded as soon as it is done; returns whether the context is still there.

    Where it is lost, nothing more is run.
    """
    recorded, device = Recorded("smoke", options), options.device
    torch.set_float32_matmul_precision("highest")

    @cache
    def expected(learner: Learner) -> tuple[tuple[float, ...], Values, Values]:
        """Returns the losses, and the values before and behind."""
        loop = plain(_model(learner), dtype=learner.dtype, device=device, clip=learner.clip, muon=learner.muon)
        before = loop.values()
        losses = losses_of(loop, device, learner.accumulate)
        return losses, before, loop.values()

    for name in names:
        mode = MODES[name]
        faulthandler.dump_traceback_later(options.patience * (COMPILING if mode.compiles else 1), exit=True)
        begin_s = time.perf_counter()
        outcome: dict[str, Any]
        told: list[str] = []
        try:
            with tempfile.TemporaryDirectory(dir=options.scratch) as folder, warnings_into(told):
                got, values = run_mode(mode, device, Path(folder))
            wanted, before, behind = expected(mode.learner)
            outcome = {"losses": got, "expected": wanted, "away": away(got, wanted)}
            outcome["moved_away"] = moved_away(values, behind, before)
        except Exception as error:  # whatever a mode ends with is what is asked
            outcome = {"error": error_of(error)}
        outcome |= {"told": told, "tolerance": TOLERANCE[mode.dtype], "wall_s": time.perf_counter() - begin_s}
        recorded.add(call_of(name), outcome)
        if "CUDA error" in outcome.get("error", ""):
            return False
    faulthandler.dump_traceback_later(options.patience, exit=True)  # of the end of the process
    return True


@contextmanager
def warnings_into(told: list[str]) -> Iterator[None]:
    """Adds each warning of the block to ``told``, once; it is printed, too, for a mode that hangs has no record."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if (line := line_of(category, message)) not in told:
                told.append(line)
            show(message, category, *where, **more)

        warnings.showwarning = note
        yield


def run_mode(mode: Mode, device: torch.device, folder: Path) -> tuple[tuple[float, ...], Values]:
    """Returns the losses of some steps in ``mode``, and the values behind them; what is stored lies in ``folder``."""
    known = {"DISK": str(folder / "store"), "COMPILED": compiled_on(device)}
    settings = {name: known.get(value, value) for name, value in mode.offload.items()}
    build = partial(offloaded, dtype=mode.dtype, device=device, settings=settings, optimizer=dict(mode.optimizer))
    build = partial(build, muon=mode.muon)
    if mode.replica:
        _join_alone(device)
        build = partial(build, offload=stronghold.replicate)
    loop = build(_model(mode))
    try:
        if not mode.resumes:
            return losses_of(loop, device, mode.accumulate, traced=mode.traced), loop.values()
        first = losses_of(loop, device, mode.accumulate, steps=2)
        stronghold.checkpoint.save(folder / "checkpoint", loop.model, loop.optimizer)
    finally:
        loop.close()
    loop = build(_model(mode))
    try:
        stronghold.checkpoint.load(folder / "checkpoint", loop.model, loop.optimizer)
        return first + losses_of(loop, device, mode.accumulate, begin=2, steps=STEPS - 2), loop.values()
    finally:
        loop.close()


def compiled_on(device: torch.device) -> dict[str, Any]:
    """Returns how layers are compiled there: one that cannot be is an error, not a layer that runs eagerly."""
    return {"fullgraph": True, "backend": "inductor" if device.type in COMPILED_FOR else "aot_eager"}


def losses_of(
    loop: Loop, device: torch.device, accumulate: int, *, begin: int = 0, steps: int = STEPS, traced: bool = False
) -> tuple[float, ...]:
    """Returns the losses of ``steps`` steps, each over ``accumulate`` parts of the same batch."""
    batches = batches_of(BATCH, SEQUENCE, VOCABULARY, device)
    for _ in range(begin):
        next(batches)

    def step(batch: Tensor) -> float:
        return loop.step(*batch.chunk(accumulate)).item()

    if not traced:
        return tuple(step(next(batches)) for _ in range(steps))
    with stronghold.trace(loop.model) as timeline:
        found = tuple(step(next(batches)) for _ in range(steps))
    if not timeline.spans():
        raise RuntimeError("a trace was asked for and has no spans")
    return found


def moved_away(got: Values, wanted: Values, before: Values) -> dict[str, float]:
    """Returns how far each layer and each root parameter has moved from where it should have, relative to the way.

    Infinity for NaN, and for what moved and should not have.
    """
    apart: dict[str, float] = {}
    way: dict[str, float] = {}
    for name, first in before.items():
        unit = layer[0] if (layer := re.match(r"\D*\d+(?=\.)", name)) else name
        apart[unit] = apart.get(unit, 0.0) + (got[name].double() - wanted[name]).square().sum().item()
        way[unit] = way.get(unit, 0.0) + (wanted[name].double() - first).square().sum().item()

    def relative(unit: str) -> float:
        if apart[unit] == 0:
            return 0.0
        found = math.sqrt(apart[unit] / way[unit]) if way[unit] else math.inf
        return found if found == found else math.inf

    return {unit: relative(unit) for unit in apart}


def _model(learner: Learner) -> nn.Module:
    torch.manual_seed(0)
    model = _built(learner.model)
    if learner.int8:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(learner.trained))
    return model


def _built(name: str) -> nn.Module:
    if name == "gpt":
        return GPT(GPTConfig(**GPT_SHAPE))
    import transformers

    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**QWEN3_MOE))


def _join_alone(device: torch.device) -> None:
    if not torch.distributed.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = torch.distributed.TCPStore("localhost", 0, 1, is_master=True)  # it lives as long as the process
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)


# ---- what starts them ----


def modes_on(device: torch.device) -> list[str]:
    """Returns the modes that PyTorch can do there, and those with torchao where it is installed."""
    every, quantises = device.type in COMPILED_FOR, importlib.util.find_spec("torchao") is not None
    modes = {name: mode for name, mode in MODES.items() if quantises or not mode.int8}
    return [n for n, mode in modes.items() if every or not mode.compiles or mode.offload.get("activations") == "keep"]


def call_of(name: str) -> dict[str, Any]:
    return {"mode": name}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    names = list(options.only or modes_on(options.device))
    if options.child:
        if not run_modes(names, options):
            sys.stdout.flush()
            os._exit(CONTEXT_LOST)  # whose destructors and joins would be errors or wait for each other
        return 0
    recorded, budget = Recorded("smoke", options), budget_of(options)
    options.out.mkdir(parents=True, exist_ok=True)
    while (left := [name for name in names if recorded.find(call_of(name)) is None]) and budget.allows():
        said = _run_child(left, options, max(1.0, budget.left_s))
        recorded.reload()
        still = [name for name in left if recorded.find(call_of(name)) is None]
        if said is not None and still:  # it died, of the first that it has no record of
            recorded.add(call_of(still[0]), {"error": f"the process died: {said}"})
        elif said is not None:
            recorded.add(call_of("the end of the process"), {"error": said})
    shown = [*names, "the end of the process"]
    found = [record for name in shown if (record := recorded.find(call_of(name)))]
    draw(table(found))
    left = [name for name in names if recorded.find(call_of(name)) is None]
    return end_of(left, names, wrong=any(status_of(record) != "ok" for record in found))


def _run_child(names: Sequence[str], options: argparse.Namespace, left_s: float) -> str | None:
    """Runs modes in a process until it ends or the time is up; returns what it said last if it died by itself."""
    command = [sys.executable, __file__, "--child", "--only", *names, "--out", str(options.out)]
    command += ["--device", str(options.device), "--patience", str(options.patience)]
    command += ["--commit", options.commit] if options.commit else []
    command += ["--scratch", options.scratch] if options.scratch else []
    with (options.out / "smoke.txt").open("ab+") as output:
        begin = output.tell()
        try:
            done = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=left_s, env=LOOPBACK | os.environ
            )
        except subprocess.TimeoutExpired:
            return None
        output.seek(begin)
        said = output.read().decode(errors="replace")
    if done.returncode in (0, CONTEXT_LOST):
        return None
    hung = re.search(r"Timeout \((\S+)\)!", said)
    return f"hung for {hung[1]}, see smoke.txt" if hung else exit_reason(done.returncode, said)


def status_of(record: Record) -> str:
    """Returns "ok", "WRONG" or "failed"."""
    if "error" in record:
        return "failed"
    near = float(record["away"]) <= record["tolerance"] and _furthest(record)[0] <= MOVED
    return "ok" if near else "WRONG"


def _furthest(record: Record) -> tuple[float, str]:
    """Returns how far the furthest of what has moved is away, and its name."""
    return max((float(one), name) for name, one in record["moved_away"].items())


def table(records: Sequence[Record]) -> Table:
    """Returns a line for each mode, the last column with what went wrong, or was warned of."""
    statuses = [status_of(record) for record in records]
    counts = ", ".join(f"{statuses.count(name)} {name}" for name in ("ok", "WRONG", "failed") if name in statuses)
    drawn = Table(title=f"modes beside plain PyTorch: {counts or 'none'}", box=box.SIMPLE)
    for name, justify in (
        ("mode", "left"),
        ("furthest loss", "right"),
        ("allowed", "right"),
        ("furthest moved", "right"),
        ("took", "right"),
        ("", "left"),
    ):
        drawn.add_column(name, justify=justify)  # type: ignore[arg-type]
    for record, status in zip(records, statuses, strict=True):
        cells = ["", "", ""]
        wrong = ""
        if "away" in record:
            furthest, unit = _furthest(record)
            cells = [f"{float(record['away']):.1e}", f"{record['tolerance']:g}", f"{furthest:.1e}"]
            wrong = "" if status == "ok" else f"{status} (moved: {unit})" if furthest > MOVED else status
        took = format_seconds(record["wall_s"]) if "wall_s" in record else ""
        said = [record.get("error", wrong), *record.get("told", ())]
        drawn.add_row(record["call"]["mode"], *cells, took, "; ".join(filter(None, said)))
    return drawn


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--only", nargs="+", choices=tuple(MODES), metavar="MODE", help="these modes alone")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, metavar="S", help="for a mode (60)")
    parser.add_argument("--scratch", metavar="DIR", help="where stores on disk lie (the system's temporary folder)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
