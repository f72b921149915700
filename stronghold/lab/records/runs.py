"""A run as its log tells it, and the figures that sum it up."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stronghold.lab.outputs import LOG_NAME
from stronghold.lab.records.json_lines import Record, read_records
from stronghold.units import format_bytes, format_count, format_seconds

WARM_UP_STEPS = 2
"""Steps left out of every median where enough follow: the first ones allocate."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run: its first record, one record per step, its last record if it came to that.

    ``resumes`` has a record for each time that it went on from a checkpoint.
    """

    name: str
    start: Record
    steps: tuple[Record, ...]
    end: Record | None
    resumes: tuple[Record, ...] = ()
    truncated: str = ""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The core of a run. Times in seconds; iteration times are the median and the 10th and 90th percentile.

    ``tflops`` counts 6·N FLOPs a token, ``tflops_with_recomputation`` 8·N, for N parameters, the embedding
    table counted once. ``device_bytes`` is what was held on the device between steps, ``peak_device_bytes``
    0 where the device does not count, ``peak_host_bytes`` the peak resident memory of the process, ``disk_bytes`` the
    most that files took, ``disk_written_bytes`` what a step writes, in the median. ``step_tokens`` are those of a step,
    in the median, where steps tell theirs: of samples that are as long as their rows, up to ``sequence``.
    """

    method: str
    parameters: int
    steps: int
    batch: int
    sequence: int
    iteration_s: float
    iteration_s_p10: float
    iteration_s_p90: float
    samples_per_s: float
    tokens_per_s: float
    tflops: float
    tflops_with_recomputation: float
    device_bytes: int
    peak_device_bytes: int
    peak_host_bytes: int
    first_loss: float
    last_loss: float
    held_out_loss: float | None = None
    disk_bytes: int = 0
    disk_written_bytes: int = 0
    step_tokens: float | None = None

    def rows(self) -> list[tuple[str, str, str]]:
        """Returns the lines of its table: (section, name, value)."""
        held = f"{format_bytes(self.device_bytes)} held" if self.device_bytes else "not told apart from the host's"
        peak_device = format_bytes(self.peak_device_bytes) if self.peak_device_bytes else f"not counted, {held}"
        spread = f"{format_seconds(self.iteration_s_p10)} to {format_seconds(self.iteration_s_p90)}"
        wear = f"{format_bytes(self.disk_written_bytes)} written a step"
        samples = f"{self.batch} x {self.sequence:,} tokens"
        if self.step_tokens is not None:
            samples = f"{self.batch} samples of up to {self.sequence:,} tokens, {self.step_tokens:,.0f} together"
        rows = [
            ("run", "method", self.method),
            ("", "parameters", f"{format_count(self.parameters)} ({self.parameters:,})"),
            ("", "steps", f"{self.steps} of {samples}"),
            ("speed", "samples/s", f"{self.samples_per_s:.4g}"),
            ("", "tokens/s", f"{self.tokens_per_s:,.0f}"),
            ("", "iteration time", f"{format_seconds(self.iteration_s)} (median; p10 to p90: {spread})"),
            ("", "TFLOPS (6·N·tokens)", f"{self.tflops:.4g}"),
            ("", "TFLOPS with recomputation (8·N·tokens)", f"{self.tflops_with_recomputation:.4g}"),
            ("memory", "peak device bytes", peak_device),
            ("", "peak host bytes", format_bytes(self.peak_host_bytes)),
            *([("", "disk bytes", f"{format_bytes(self.disk_bytes)}, {wear}")] if self.disk_bytes else []),
            ("loss", "first", f"{self.first_loss:.4f}"),
            ("", "last", f"{self.last_loss:.4f}"),
        ]
        if self.held_out_loss is not None:
            rows.append(("", "on held-out text", f"{self.held_out_loss:.4f}"))
        return rows

    def record(self) -> Record:
        """Returns itself as the fields of a record."""
        return asdict(self)


def summarize(
    start: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], *, held_out_loss: float | None = None
) -> Summary:
    """Sums up a run by its first record and its steps' records, of which there must be one at least."""
    settings = start["settings"]
    tokens = statistics.median(tokens_of(start, step) for step in steps)
    # A step may accumulate several batches, and the last one of an epoch has what is left.
    batch = round(statistics.median_high(step.get("batch", settings["batch"]) for step in steps))
    sequence = settings["sequence"]
    timed = steps[WARM_UP_STEPS:] if len(steps) > 2 * WARM_UP_STEPS else steps[1:] or steps
    times = sorted(step["iteration_s"] for step in timed)
    iteration_s = statistics.median(times)
    # 2·N a token forward and 4·N backward, N every parameter once: a tied embedding counts for the head's product,
    # biases and norms as if they were matrices, attention's own products not at all.
    flops = 6 * start["parameters"] * tokens
    return Summary(
        method=settings["method"],
        parameters=start["parameters"],
        steps=len(steps),
        batch=batch,
        sequence=sequence,
        iteration_s=iteration_s,
        iteration_s_p10=times[round(0.1 * (len(times) - 1))],
        iteration_s_p90=times[round(0.9 * (len(times) - 1))],
        samples_per_s=batch / iteration_s,
        tokens_per_s=tokens / iteration_s,
        tflops=flops / iteration_s / 1e12,
        tflops_with_recomputation=flops * 8 / 6 / iteration_s / 1e12,
        device_bytes=max(step["device_bytes"] for step in steps),
        peak_device_bytes=max(step["peak_device_bytes"] for step in steps),
        peak_host_bytes=max(step["peak_host_bytes"] for step in steps),
        first_loss=to_float(steps[0]["loss"]),
        last_loss=to_float(steps[-1]["loss"]),
        held_out_loss=held_out_loss,
        disk_bytes=max(step.get("disk_bytes", 0) for step in steps),
        disk_written_bytes=round(statistics.median(step.get("disk_written_bytes", 0) for step in timed)),
        step_tokens=tokens if any("tokens" in step for step in steps) else None,
    )


def tokens_of(start: Mapping[str, Any], step: Mapping[str, Any]) -> float:
    """Returns the tokens of a step, which it tells where a batch is only filled up to its longest row."""
    settings = start["settings"]
    return float(step.get("tokens", settings["batch"] * settings["sequence"]))


def read_run(path: str | Path) -> Run:
    """Reads the run of a folder with a log.jsonl, or of such a file itself.

    Raises ValueError, naming the file, where there is no log or it is not of a training run.
    """
    path = Path(path)
    file = path / LOG_NAME if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"a run must be a folder with a {LOG_NAME}, or that file (got {str(path)!r}); pass one")
    found = read_records(file)
    starts = [record for record in found.records if record.get("event") == "start"]
    steps = tuple(record for record in found.records if record.get("event") == "step")
    if not starts or not all({"step", "loss", "iteration_s"} <= step.keys() for step in steps):
        raise ValueError(
            f"a run's log must begin with a record of its start, and tell step, loss and iteration_s of each "
            f"step (got {str(file)!r}); pass the log of `stronghold train`"
        )
    ends = [record for record in found.records if record.get("event") == "end"]
    name = file.parent.name if file.name == LOG_NAME else file.stem
    return Run(
        name=name or str(file),
        start=starts[0],
        steps=steps,
        end=ends[-1] if ends else None,
        resumes=tuple(record for record in found.records if record.get("event") == "resume"),
        truncated=found.truncated,
    )


def to_float(value: Any) -> float:
    """Returns a number of a record, where NaN and infinities are their names."""
    return float(value) if value is not None else math.nan
