"""Training runs in processes of their own, for the benchmarks that compare methods, and the time that they may take."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

from stronghold.lab.command import error_in
from stronghold.lab.outputs import LOG_NAME, TIMELINE_NAME
from stronghold.lab.records.json_lines import Record, read_records
from stronghold.lab.records.trials import end, exit_reason
from stronghold.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a run came to: its ``record`` and its log's ``steps``, or the ``reason`` why it has none.

    ``wall_s`` are the seconds that the process took, ``late`` tells that it was ended because they were too many.
    """

    record: Record | None
    steps: tuple[Record, ...]
    reason: str
    wall_s: float
    late: bool = False


def train(
    arguments: Sequence[str], *, scratch: str | None = None, timeout_s: float | None = None, keep: Path | None = None
) -> Call:
    """Runs ``stronghold train`` with ``arguments``; where it writes is in ``scratch``, and goes with it.

    The process and its children are ended after ``timeout_s`` seconds, and whenever this function is left. Beside the
    path ``keep`` stay the timeline of the run's third step (.timeline.json), if its method records one, and what a run
    that failed has said (.txt).
    """
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir=scratch, prefix="call-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "stronghold", "train", *arguments]
        command += ["--out", str(folder / "run"), "--record", str(folder / "record.jsonl")]
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            try:
                process.wait(timeout_s)
                late = False
            except subprocess.TimeoutExpired:
                late = True
            finally:
                end(process)
        wall_s = time.monotonic() - begin_s
        said = (folder / "output").read_text(errors="replace")
        if timeout_s is not None and late:
            reason = f"not done after {format_seconds(timeout_s)}"
        else:
            reason = failure(process.returncode, said)
        if keep is not None:
            _keep(folder, keep, said if reason else "")
        if reason:
            return Call(record=None, steps=(), reason=reason, wall_s=wall_s, late=late)
        logged = read_records(folder / "run" / LOG_NAME).records
        steps = tuple(line for line in logged if line.get("event") == "step")
        return Call(record=read_records(folder / "record.jsonl").records[-1], steps=steps, reason="", wall_s=wall_s)


def failure(code: int, said: str) -> str:
    """Returns why a run failed: the error that it told, or the last line; nothing if it did not."""
    told = error_in(said.splitlines())
    return told[:300] if code and told else exit_reason(code, said)


def _keep(folder: Path, stem: Path, said: str) -> None:
    stem.parent.mkdir(parents=True, exist_ok=True)
    timeline = folder / "run" / TIMELINE_NAME
    if timeline.exists():
        shutil.copyfile(timeline, f"{stem}.timeline.json")
    if said:
        Path(f"{stem}.txt").write_text(said)


class Budget:
    """A time in seconds, from now on, and the longest call in it so far."""

    def __init__(self, total_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end_s = clock() + total_s
        self._longest_s = 0.0

    @property
    def left_s(self) -> float:
        return self._end_s - self._clock()

    def took(self, call_s: float) -> None:
        """Called with how long a call took."""
        self._longest_s = max(self._longest_s, call_s)

    def allows(self, *, times_longest: float = 1.0) -> bool:
        """Tells whether a call may begin that takes ``times_longest`` what the longest took."""
        return self.left_s > times_longest * self._longest_s


def spread(values: Iterable[float]) -> dict[str, float]:
    """Returns the quartiles of ``values`` and their median; of a single value, itself."""
    found = list(values)
    low, median, high = quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3
    return {"low": low, "median": median, "high": high}
