"""Where a step goes on this device, in each of many settings, beside plain PyTorch with everything on the device.

    python benchmarks/gpu/trace_steps.py [--batches 32 4] [--cap 16GiB] [--rounds 3] [--steps 3]

One process trains the reference GPT (1.717 B parameters, bf16) by the ordinary loop, wholly resident, and beside it in
one setting of stronghold's after the other: some steps of the one, some of the other, in turn, so that a ratio is of
two neighbours. Each setting's losses must be the ordinary loop's. Of the first --traces settings one step is traced by
torch.profiler, too, which takes as long as all else of a setting: how busy the device is, what is copied and how much
of that time is under computing, and the largest gaps of the computation, each with the kernels around it and the
engine's wait or the host's call that it was for. On the CPU the profiler sees operations of PyTorch alone, and copies
are the engine's own spans.

Appends a JSON line for each setting to trace.jsonl; the traces stay beside it (trace_*.json.gz, for ui.perfetto.dev).
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any

import torch
from half_hour import Recorded, add_options, budget_of, draw, end_of, error_of, say, within
from loops import away, batches_of, held_bytes, least_peak, offloaded, peak_bytes, plain, reset_peak
from meanwhile import Asked, in_words
from trace_settings import SMALL, Setting, Shape, call_of, offload_settings, settings_of
from trace_table import gap_table, is_wrong, name_of, table, why_idle
from trace_turns import Turns, traced

import stronghold
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.lab.records.agreement import TOLERANCE
from stronghold.units import format_seconds, parse_bytes

WARM_UP = 2
LR = 3e-6


class Course:
    """The settings of one batch, beside one ordinary loop that stays where it is."""

    def __init__(self, shape: Shape, batch: int, options: argparse.Namespace, pristine: GPT) -> None:
        self.shape, self.batch, self._options, self._pristine = shape, batch, options, pristine
        self._device = options.device
        self._losses = WARM_UP + options.rounds * (options.steps + 1)
        reset_peak(self._device)
        loop = plain(copy.deepcopy(pristine), dtype=shape.dtype, device=self._device, lr=LR, recompute=True)
        self.ordinary = Turns(loop, batch, shape, self._device)
        while len(self.ordinary.losses) < self._losses:
            self.ordinary.step()
        self._expected = self.ordinary.first_losses(self._losses)
        self._peak_bytes = peak_bytes(self._device)

    def ordinary_record(self, keep: Path | None) -> dict[str, Any]:
        """Returns what the ordinary loop itself comes to."""
        seconds = [self.ordinary.timed(self._options.steps) for _ in range(self._options.rounds)]
        found = {"step_s": seconds, "peak_bytes": self._peak_bytes, "parameters": self._pristine.config.parameters}
        if self._device.type == "cuda":
            asked = Asked(self._device)
            self.ordinary.timed(self._options.steps)  # not counted
            found["while"] = asked.answer()
        return found | _traced(self.ordinary, self._device, keep)

    def measure(self, setting: Setting, keep: Path | None) -> dict[str, Any]:
        """Returns what ``setting`` comes to, in turn with the ordinary loop."""
        device, options = self._device, self._options
        before_bytes = held_bytes(device)
        begin_s = time.perf_counter()
        settings = offload_settings(self.shape, setting, on_host=device.type == "cpu")
        loop = offloaded(
            copy.deepcopy(self._pristine),
            dtype=self.shape.dtype,
            device=device,
            lr=LR,
            settings=settings,
            optimizer={"update": setting.update, "states": setting.states},
        )
        try:
            turns = Turns(loop, self.batch, self.shape, device)
            for _ in range(WARM_UP):
                turns.step()
            turns.settle()
            prepared_s = time.perf_counter() - begin_s
            reset_peak(device)
            own_s, ordinary_s, ratios = [], [], []
            for _ in range(options.rounds):
                ordinary_s.append(self.ordinary.timed(options.steps))
                own_s.append(turns.timed(options.steps))
                ratios.append(ordinary_s[-1] / own_s[-1])
            report = loop.report()
            assert report is not None and report.step is not None
            losses = turns.first_losses(self._losses)
            found = {
                "step_s": own_s,
                "ordinary_s": ordinary_s,
                "of_ordinary": ratios,
                "prepared_s": prepared_s,
                "away": away(losses, self._expected),
                "tolerance": TOLERANCE[self.shape.dtype],
                "parameters": report.parameters,
                "placement": {
                    "window": report.window,
                    "resident": report.resident,
                    "activations": settings.get("activations"),
                    "micro_batch": settings.get("micro_batch"),
                },
                "planned": report.planned and {"chosen": report.planned.chosen, "step_s": report.planned.likely_s},
                "waits_s": {"fetch": report.step.fetch_wait_s, "update": report.step.update_wait_s},
                "moved_bytes": {"up": report.step.fetched_bytes, "down": report.step.gradient_bytes},
                "held_bytes": held_bytes(device) - before_bytes,
                "report_bytes": report.device_bytes,
                "pinned_bytes": report.pinned_host_bytes,
            }
            found |= _traced(turns, device, keep)
            few = next(batches_of(1, 8, self.shape.vocabulary, device))
            return found | least_peak(loop, few, device, before_bytes)
        finally:
            loop.close()


def _traced(turns: Turns, device: torch.device, keep: Path | None) -> dict[str, Any]:
    """Returns what a traced step comes to, or nothing where no file is to ``keep`` it."""
    return {} if keep is None else {"trace": traced(turns, device, keep)}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    recorded, budget = Recorded("trace", options), budget_of(options)
    settings = options.settings
    wanted: list[tuple[int, Setting | None]] = [
        pair
        for batch in dict.fromkeys(options.batches)
        for pair in [(batch, None), *((batch, setting) for setting in settings if setting.batch == batch)]
    ]
    calls = [call_of(options.shape, setting, batch) for batch, setting in wanted]
    pristine: GPT | None = None
    course: Course | None = None
    with within(budget):
        for number, ((batch, setting), call) in enumerate(zip(wanted, calls, strict=True)):
            if recorded.find(call) is not None:
                continue
            if not budget.allows():
                break
            begin_s = budget.left_s
            try:
                if pristine is None:
                    pristine = GPT(GPTConfig(**{k: v for k, v in vars(options.shape).items() if k != "dtype"}))
                if course is None or course.batch != batch:
                    course = None  # the memory of one is the next one's:
                    gc.collect()  # layers that are computed again are in a cycle with their model
                    course = Course(options.shape, batch, options, pristine)
                    begin_s = budget.left_s  # a setting does not pay for this again
                keep = options.out / f"trace_{number:02}.json.gz" if number < options.traces else None
                outcome = course.ordinary_record(keep) if setting is None else course.measure(setting, keep)
            except (RuntimeError, ValueError, MemoryError, stronghold.errors.StrongholdError) as error:
                outcome = {"error": error_of(error)}
            recorded.add(call, outcome)
            budget.took(begin_s - budget.left_s)
            name = "plain PyTorch" if setting is None else setting.name
            if "while" in outcome:
                say(f"meanwhile: {in_words(outcome['while'])}")
            say(f"{name}: {outcome.get('error') or format_seconds(median(outcome['step_s'])) + ' per step'}")
            if "CUDA error" in outcome.get("error", ""):
                break  # the context is lost
    found = [record for call in calls if (record := recorded.find(call))]
    whole = [record for record in found if "parameters" in record]
    seen = [record for record in whole if "trace" in record]
    for record in seen[: options.gaps]:
        draw(gap_table(record))
    for record in seen:
        say(why_idle(record))
    if whole:
        draw(table(whole, str(options.device)))
    for record in found:
        if "error" in record:
            say(f"failed: {name_of(record['call'])}: {record['error']}")
    wrong = any(map(is_wrong, found))
    return end_of(recorded.left(calls), calls, wrong=wrong)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    add = parser.add_argument
    for name in ("layers", "hidden", "heads", "vocabulary", "sequence"):
        add(f"--{name}", type=int, metavar="N", help=f"({getattr(Shape(), name)})")
    add("--dtype", choices=("fp32", "bf16"), help="(bf16)")
    add("--batches", type=int, nargs=2, metavar="N", help="samples of a step: many, and few (32 4)")
    add("--cap", type=parse_bytes, metavar="SIZE", help="device memory to fill with resident layers (16GiB)")
    add(
        "--only",
        nargs="+",
        default=["*"],
        metavar="NAME",
        help="settings, such as 'batch 4, *' and '*, compiled' (all)",
    )
    add("--rounds", type=int, default=3, metavar="N", help="turns of each (3)")
    add("--steps", type=int, default=3, metavar="N", help="that a turn counts (3)")
    add("--traces", type=int, default=4, metavar="N", help="how many settings are traced (4)")
    add("--gaps", type=int, default=3, metavar="N", help="how many settings' gaps are drawn (3); all are recorded")
    options = parser.parse_args(arguments)
    small = options.small or options.device.type == "cpu"
    told = {name: v for name in vars(Shape()) if (v := getattr(options, name)) is not None}
    options.shape = Shape(**vars(SMALL if small else Shape()) | told)
    options.batches = tuple(options.batches or ((4, 2) if small else (32, 4)))
    options.cap = options.cap or parse_bytes("16MiB" if small else "16GiB")
    every = settings_of(options.shape, options.batches, options.cap)
    options.settings = [one for one in every if any(fnmatchcase(one.name, wanted) for wanted in options.only)]
    if not options.settings:
        parser.error(f"--only must name a setting (got {options.only}); there are: {'; '.join(o.name for o in every)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
