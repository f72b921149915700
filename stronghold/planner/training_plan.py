"""A plan: settings, what a step of them takes, and what else was looked at."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stronghold.formats.whole_file import write_whole
from stronghold.planned import PlannedStep
from stronghold.planner.machine_file import Spread
from stronghold.planner.other_plans import Alternative, LeftOut, Refused
from stronghold.planner.plan_lines import BUDGETS, duration, section, shown, stages_shown
from stronghold.planner.plan_table import busy_rows, memory_rows
from stronghold.planner.plan_values import check_plan_values
from stronghold.settings import OffloadSettings
from stronghold.spans import Span
from stronghold.tables import Shown
from stronghold.units import format_bytes, format_count, format_seconds

VERSION = 2
_WAITED = {"fetch": "fetch_wait_s", "update": "update_wait_s", "disk": "disk_wait_s"}
"""Those that a run tells apart, by its own names."""
_FOLLOW = ("balance", "schedule")
"""What of several processes follows from their stages and micro-batches."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan(Shown):
    """How to train a model on a machine; ``str()`` of it is a table to read.

    ``settings`` are ``stronghold.offload``'s and ``optimizer`` what ``stronghold.AdamW``, or as ``updated_by`` says
    ``stronghold.Muon``, is to get. ``assumed`` are what its numbers rest on that was not measured. ``step_s`` are the
    seconds of a step over ``samples`` samples of ``tokens`` tokens together, by the quartiles and the median of what
    the machine was measured to do. ``busy_s`` is what each resource works in a step, ``longest`` the one that works
    most, ``waits_s`` what the computation stands still for. Bytes are those of the report; ``activation_bytes``, with
    what updates take there (``update_bytes`` of them as the report says), and the root's gradients come on top of them
    in a step; these are in the activations where a step has one batch. ``process_bytes`` are the interpreter's and its
    libraries', ``written_bytes`` what a step writes to disk. ``is_host`` tells that device and host are one memory.
    ``further_s`` is what one more batch takes whose gradients are added up, ``"step"`` and what of it are waits;
    nothing where none is.

    Of several ``processes`` on the machine bytes are those of the fullest one, in each place, and ``parallel`` is what
    ``stronghold.pipeline`` takes beside the settings: stages, replicas, micro-batches, schedule and the layers of each
    stage, with the part of them that is recomputed where that is neither all nor none; or one stage, and the replicas
    of ``stronghold.replicate``. ``left_out`` are those that cannot be.
    """

    title = "plan"

    model: str
    parameters: int
    trained_parameters: int
    layers: int
    samples: int
    tokens: int
    dtype: str
    machine: str
    device: str
    is_host: bool
    settings: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    step_s: Spread
    longest: str
    busy_s: Mapping[str, float]
    waits_s: Mapping[str, float]
    slots_bytes: int
    gradient_bytes: int
    root_bytes: int
    resident_bytes: int
    root_gradient_bytes: int
    activation_bytes: int
    pinned_bytes: int
    pageable_bytes: int
    process_bytes: int
    disk_bytes: int
    written_bytes: int
    asked_tokens: int = 10**9
    """Of which the table says how long they take."""
    others: Sequence[Alternative] = ()
    refused: Sequence[Refused] = ()
    spans: Sequence[Span] = field(default=(), repr=False)
    processes: int = 1
    parallel: Mapping[str, Any] = field(default_factory=dict)
    left_out: Sequence[LeftOut] = ()
    updated_by: str = "AdamW"
    update_bytes: int = 0
    assumed: Sequence[str] = ()
    further_s: Mapping[str, float] = field(default_factory=dict)
    version: int = VERSION

    @property
    def experts_per_part(self) -> int | None:
        """Into parts of how many experts a mixture is cut, None for whole layers."""
        found: int | None = self.settings.get("experts_per_part")
        return found

    @property
    def accumulate(self) -> int:
        """How many batches' gradients a step adds up."""
        return self.settings.get("accumulate") or 1

    def offload_settings(self) -> OffloadSettings:
        """Returns the settings but for ``experts_per_part``. Raises TypeError and ValueError for what they are not."""
        return OffloadSettings(**{name: value for name, value in self.settings.items() if name != "experts_per_part"})

    @property
    def held_device_bytes(self) -> int:
        """What is held on the device between steps."""
        return self.slots_bytes + self.gradient_bytes + self.root_bytes + self.resident_bytes

    @property
    def device_bytes(self) -> int:
        """The most that a step takes there."""
        return self.held_device_bytes + self.root_gradient_bytes + self.activation_bytes

    @property
    def host_bytes(self) -> int:
        """The most that a step takes of host memory, the process and, where it is the same, the device's with it."""
        held = self.pinned_bytes + self.pageable_bytes + self.process_bytes
        return held + (self.device_bytes if self.is_host else 0)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s.likely

    def days(self, tokens: float) -> float:
        """Returns the days that training on so many tokens takes."""
        return tokens / self.tokens_per_s / 86400

    def planned(self) -> PlannedStep:
        """Returns what is shown beside a step that was measured."""
        waits_s = {part: self.waits_s.get(cause, 0.0) for cause, part in _WAITED.items()}
        settings = {**self.parallel, **self.settings, **self.optimizer}
        chosen = {name: value for name, value in settings.items() if name not in BUDGETS}
        return PlannedStep(
            chosen=", ".join(f"{name}={value!r}" for name, value in chosen.items()),
            reason=self._reason(),
            low_s=self.step_s.low,
            likely_s=self.step_s.likely,
            high_s=self.step_s.high,
            parts_s={"compute_s": self.step_s.likely - sum(waits_s.values()), **waits_s},
            passes=self.accumulate,
            further_s=self._further_parts_s(),
            device_bytes=self.device_bytes,
            host_bytes=self.host_bytes,
        )

    def _further_parts_s(self) -> dict[str, float]:
        """Returns what one more batch takes, by the parts of a step that a run tells apart."""
        if not self.further_s:
            return {}
        waits_s = {part: self.further_s.get(cause, 0.0) for cause, part in _WAITED.items()}
        return {"compute_s": self.further_s["step"] - sum(waits_s.values()), **waits_s}

    def _reason(self) -> str:
        """Returns why these settings: what is longest under them, and what would be next, or what lacks for others."""
        step_s = self.step_s.likely
        found = [f"{self.longest} works {self.busy_s[self.longest] / step_s:.0%} of {format_seconds(step_s)} a step"]
        if self.settings["resident"] == self.layers:
            found = ["the model fits, and stays", *found]
        for other in self.others[:1]:
            found.append(f"{self._differing(other)} takes {format_seconds(other.step_s)}")
        for one in self.refused[:1]:
            found.append(f"{self._differing(one)} {one.lacks()} ({one.place})")
        return "; ".join([*found, *(f"assumed: {text}" for text in self.assumed)])

    def rows(self) -> list[tuple[str, str, str]]:
        """Returns the table's lines: (section, name, value)."""
        step, trained = self.step_s, format_count(self.parameters)
        if self.trained_parameters != self.parameters:
            trained += f", {format_count(self.trained_parameters)} of them trained"
        between = f"{format_seconds(step.low)} to {format_seconds(step.high)}"
        rows = [
            ("model", "name", self.model),
            ("", "parameters", trained),
            ("", "layers", f"{self.layers} in {self.dtype}"),
            ("machine", "device", self.device if self.device == self.machine else f"{self.device}, {self.machine}"),
            *self._process_rows(),
            *section("offload", {name: shown(name, value) for name, value in self.settings.items()}),
            *section(self.updated_by, {name: shown(name, value) for name, value in self.optimizer.items()}),
            ("step", "time", f"{format_seconds(step.likely)} ({between})"),
            (
                "",
                "speed",
                f"{format_count(round(self.tokens_per_s))} tokens/s, {self.samples} samples a step{self._batches()}",
            ),
            ("", f"{format_count(self.asked_tokens)} tokens", duration(86400 * self.days(self.asked_tokens))),
            *busy_rows(self),
            *memory_rows(self),
        ]
        if self.disk_bytes:
            written = f"{format_bytes(self.written_bytes)} a step, {self.written_bytes / 1e9:.3g} TB in a thousand"
            of = ", of the fullest process" if self.processes > 1 else ""
            held = "layers, states, inputs" if self.settings.get("activations") == "disk" else "layers and states"
            rows += [("disk", held, format_bytes(self.disk_bytes) + of), ("", "written", written + of)]
        assumed = [("assumed" if not number else "", "", text) for number, text in enumerate(self.assumed)]
        return [*rows, *self._other_rows(), *assumed]

    def _batches(self) -> str:
        if self.accumulate == 1:
            return ""
        further = f", each further one {format_seconds(self.further_s['step'])}" if self.further_s else ""
        return f" in {self.accumulate} batches{further}"

    def _other_rows(self) -> list[tuple[str, str, str]]:
        """Returns the lines of other settings, of which only what differs from those of the plan is told."""
        rows = []
        for number, other in enumerate(self.others):
            takes = f"host {format_bytes(other.host_bytes)}"
            if not self.is_host:
                takes = f"device {format_bytes(other.device_bytes)}, {takes}"
            value = f"{self._differing(other)}: {takes}"
            rows.append(("next best" if not number else "", format_seconds(other.step_s), value))
        for number, one in enumerate(self.refused):
            rows.append(("does not fit" if not number else "", one.place, f"{self._differing(one)}: {one.lacks()}"))
        for number, left in enumerate(self.left_out):
            named = f"stages={left.stages}, replicas={left.replicas}"
            rows.append(("left out" if not number else "", named, left.reason))
        return rows

    def _process_rows(self) -> list[tuple[str, str, str]]:
        if self.processes == 1:
            return []
        memory = format_bytes(self.host_bytes) if self.is_host else f"device {format_bytes(self.device_bytes)}, host "
        lines = {
            "number": f"{self.processes} on this machine; start as many by torchrun",
            "stages": str(self.parallel["stages"]),
            "replicas": str(self.parallel["replicas"]),
        }
        if self.parallel["stages"] > 1:
            lines["stages"] += f", of {stages_shown(self.parallel['balance'])}"
            lines["micro-batches"] = f"{self.parallel['micro_batches']} under {self.parallel['schedule']}"
        lines["memory of each"] = f"{memory}{'' if self.is_host else format_bytes(self.host_bytes)} at most"
        return section("processes", lines)

    def _differing(self, one: Alternative | Refused) -> str:
        ours = {"store": "ram", **self.parallel, **self.settings, **self.optimizer}
        theirs = {"store": "ram", **one.parallel, **one.settings, **one.optimizer}
        if one.parallel:  # what else follows from these
            ours, theirs = ({name: each.get(name) for name in theirs if name not in _FOLLOW} for each in (ours, theirs))
        names = [name for name in {**ours, **theirs} if name not in BUDGETS and ours.get(name) != theirs.get(name)]
        cut = one.parallel.get("balance")
        some = [f"of {stages_shown(cut)}"] if isinstance(cut, Mapping) else []  # where layers keep their activations
        return ", ".join([*(f"{name}={theirs.get(name)!r}" for name in names), *some]) or "the same"

    def to_json(self) -> str:
        found = asdict(self)
        if self.processes == 1:
            for one in (found, *found["others"], *found["refused"]):
                for name in ("processes", "parallel", "left_out"):
                    one.pop(name, None)
        return json.dumps(found, indent=1)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, the file whole. Raises OSError."""
        write_whole(path, self.to_json() + "\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> TrainingPlan:
        """Returns what :meth:`write` wrote. Raises ValueError for a file that holds no plan, OSError for none."""
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        try:
            found = json.loads(text)
            if not isinstance(found, dict) or found.get("version") != VERSION:
                raise ValueError(f"its version is not {VERSION}")
            found["step_s"] = Spread(*map(float, found["step_s"]))
            found["others"] = [Alternative(**one) for one in found["others"]]
            found["refused"] = [Refused(**one) for one in found["refused"]]
            found["left_out"] = tuple(LeftOut(**one) for one in found.get("left_out", ()))
            found["spans"] = [Span(lane, name, float(begin), float(end)) for lane, name, begin, end in found["spans"]]
            plan = cls(**found)
            check_plan_values(found)
            plan.offload_settings()
            str(plan), plan.planned()
        except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(
                f"{os.fspath(path)!r} is no plan: {type(error).__name__}, {error}; make one: stronghold plan -o "
                "plan.json"
            ) from error
        return plan
