"""Makes the calls of benchmarks/gpu/compare.py within a time, each once, and records what they come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from calls import Budget, Call, train
from compare_parts import Course, Fit, Round, Setting, command, fit, fit_tighter
from half_hour import identity

from stronghold.lab.records.json_lines import Record, append_record, describe_machine, read_records, to_line
from stronghold.units import format_seconds

TRIES = 3
"""How often a method is called that can do with less where a cap was too small."""
OUT_OF_MEMORY = " out of memory"
"""What PyTorch says behind the name of a device: CUDA, HIP, XPU."""
OF_A_STEP = (
    *("step", "loss", "iteration_s", "compute_s", "fetch_wait_s", "update_wait_s", "disk_wait_s"),
    "peak_device_bytes",
)
"""What a record keeps of each step."""
Say = Callable[[str], None]


class OutOfTime(Exception):
    """No further call would end within the time."""


class Runner:
    """The calls of one part: those that the file at ``out`` has of this machine and commit, and those that are made.

    ``commit`` stands for git's, where the tree is no checkout. ``again`` leaves out what was there before. A call is
    ended after ``timeout_s`` seconds, or with ``budget``. Files stay in ``keep``, and lie in ``scratch`` meanwhile.
    """

    def __init__(
        self,
        part: str,
        course: Course,
        *,
        out: Path,
        budget: Budget,
        timeout_s: float,
        say: Say,
        commit: str | None = None,
        again: bool = False,
        keep: Path | None = None,
        scratch: str | None = None,
    ) -> None:
        self.course = course
        self._out, self._budget, self._timeout_s, self._say = out, budget, timeout_s, say
        self._keep, self._scratch = keep, scratch
        self._machine = describe_machine()
        self._machine["commit"] = commit or self._machine["commit"]
        self._here = identity(self._machine)
        found = read_records(out).records if out.exists() and not again else ()
        self.records = [one for one in found if one.get("here") == self._here and one["call"]["part"] == part]

    def left(self, rounds: Sequence[Round]) -> list[Round]:
        """Returns what of ``rounds`` there is no record of yet; a setting that has failed once is not tried again."""
        known = {to_line(record["call"]) for record in self.records}
        left = [
            one._replace(
                settings=tuple(
                    setting
                    for setting in one.settings
                    if to_line(self._call(one.number, setting)) not in known and not self._has_failed(setting)
                )
            )
            for one in rounds
        ]
        return [one for one in left if one.settings]

    def run(self, rounds: Sequence[Round], prepare: Callable[[str], str]) -> None:
        """Makes the calls of ``rounds`` that are left, each round's reference first.

        ``prepare`` is called with a method before it is: what it returns is why that is not to be called. A line of the
        table says so, but no record, for it may change. Raises OutOfTime where the time does not suffice.
        """
        refused: dict[str, str] = {}
        for whole in rounds:
            for one in self.left([whole]):  # only now: what has failed in one round is not in the next
                self._make(one.number, one.reference)
                for setting in one.settings:
                    if setting.method not in refused:
                        refused[setting.method] = prepare(setting.method)
                    if reason := refused[setting.method]:
                        self.records.append(self._record(one.number, setting) | {"error": reason})
                    else:
                        self._make(one.number, setting)

    def _make(self, number: int, setting: Setting) -> None:
        if self._has_failed(setting):
            return
        if not self._budget.allows():
            raise OutOfTime
        fitted = self._fit(setting)
        stem = self._keep / setting.name if self._keep is not None else None
        for attempt in range(1, TRIES + 1):
            timeout_s = min(self._timeout_s, self._budget.left_s)
            call = train(command(self.course, setting, fitted), scratch=self._scratch, timeout_s=timeout_s, keep=stem)
            self._budget.took(call.wall_s)
            if call.late and timeout_s < self._timeout_s:
                raise OutOfTime
            tighter = self._tighter(setting, fitted, call)
            if attempt == TRIES or tighter is None:
                break
            self._say(f"  {setting.name}: {call.reason}; again with {tighter}")
            fitted = tighter
        record = self._record(number, setting) | self._outcome(call, fitted)
        self.records.append(record)
        append_record(self._out, record)
        rate = f"failed: {call.reason}" if call.reason else f"{record['summary']['samples_per_s']:.4g} samples/s"
        self._say(f"round {number}, {setting.name}: {rate} ({format_seconds(call.wall_s)} with its start)")

    def _tighter(self, setting: Setting, fitted: Fit, call: Call) -> Fit | None:
        """Returns what to try after a call that went beyond its cap, if there is something to try, and the time."""
        if OUT_OF_MEMORY not in call.reason or not self._budget.allows():
            return None
        return fit_tighter(self.course, setting, fitted)

    def _fit(self, setting: Setting) -> Fit:
        """Returns what sufficed in another round, or else what should."""
        alike = [one for one in self.records if one["call"] | {"round": 0} == self._call(0, setting)]
        found = [one for one in alike if "error" not in one]
        return Fit(**{item.name: found[-1][item.name] for item in fields(Fit)}) if found else fit(self.course, setting)

    def _has_failed(self, setting: Setting) -> bool:
        failed = (record["call"] for record in self.records if "error" in record)
        return self._call(0, setting) in [call | {"round": 0} for call in failed]

    def _record(self, number: int, setting: Setting) -> Record:
        call = self._call(number, setting)
        return {"benchmark": "gpu", "here": self._here, "call": call, "machine": self._machine}

    def _outcome(self, call: Call, fitted: Fit) -> Record:
        found: Record = {**asdict(fitted), "wall_s": round(call.wall_s, 2)}
        if call.record is None:
            return {**found, "error": call.reason}
        machine = {**call.record["machine"], "commit": self._here["commit"]}
        steps = [{name: step[name] for name in OF_A_STEP} for step in call.steps]
        return {**found, **call.record, "machine": machine, "steps": steps}

    def _call(self, number: int, setting: Setting) -> dict[str, Any]:
        return {"round": number, **asdict(setting), **asdict(self.course)}
