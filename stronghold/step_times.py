"""What a step took, of a whole model and of its stages."""

from __future__ import annotations

from dataclasses import dataclass

from stronghold.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """One optimizer step: its time in seconds, and what crossed the link between host and device.

    ``total_s`` is from the end of the step before, with so many backward ``passes``. The model is left alone for
    ``outside_s``: from the end of the step before, or of a backward pass, to the first layer of a training pass, as
    while a loader reads, a checkpoint is written or the model is evaluated, without gradients and in ``eval()``. The
    waits are for a layer's fetch from host memory, for an update before its weights are used, wherever that is, and for
    a fetch from disk; ``compute_s`` is the rest.

    What was moved is counted from the end of the step before. ``spared_fetches`` are parts of experts that no token
    needed, not fetched in the forward pass. What the disk has read and written belongs, in part, to the updates of the
    step before; ``disk_busy_s`` is how long it was at it. ``reduced_bytes`` of gradients went to other replicas, as by
    a ring.
    """

    total_s: float
    compute_s: float
    fetch_wait_s: float
    update_wait_s: float
    disk_wait_s: float
    fetches: int
    fetched_bytes: int
    gradient_bytes: int
    reduced_bytes: int = 0
    crossed_bytes: int = 0
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    disk_busy_s: float = 0.0
    spared_fetches: int = 0
    spared_bytes: int = 0
    passes: int = 1
    outside_s: float = 0.0

    @property
    def training_s(self) -> float:
        """What the step took by itself, which is what was planned."""
        return self.total_s - self.outside_s

    def rows(self) -> list[tuple[str, str, str]]:
        """Returns the report's lines of it."""
        spared = f"{format_bytes(self.spared_bytes)} in {self.spared_fetches} fetches spared"
        return [
            ("last step", "total", format_seconds(self.total_s)),
            ("", "computing", self.share(self.compute_s)),
            ("", "waiting for a fetch", self.share(self.fetch_wait_s)),
            ("", "waiting for an update", self.share(self.update_wait_s)),
            ("", "waiting for disk", self.share(self.disk_wait_s)),
            ("", "beside training", self.share(self.outside_s)),
            ("", "fetched", f"{format_bytes(self.fetched_bytes)} in {self.fetches} fetches"),
            *([("", "experts not needed", spared)] if self.spared_fetches else []),
            ("", "gradients down", format_bytes(self.gradient_bytes)),
            *([("", "to replicas", format_bytes(self.reduced_bytes))] if self.reduced_bytes else []),
            *([("", "to other machines", format_bytes(self.crossed_bytes))] if self.crossed_bytes else []),
        ]

    def disk_rows(self) -> list[tuple[str, str, str]]:
        """Returns those of what the disk did in it."""
        written = self.disk_written_bytes
        return [
            ("", "disk busy", self.share(self.disk_busy_s)),
            ("", "read from disk", format_bytes(self.disk_read_bytes)),
            ("", "written to disk", f"{format_bytes(written)}, {written / 1e9:.3g} TB in a thousand steps"),
        ]

    def share(self, seconds: float) -> str:
        """Returns so many seconds of the step, to read, with the share of it that they are."""
        share = f" ({seconds / self.total_s:.0%})" if self.total_s > 0 else ""
        return f"{format_seconds(seconds)}{share}"


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """What a stage was planned to take in a step, and the most that it takes on the device in it."""

    computing_s: float
    waiting_s: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """One stage in the last forward and backward pass of a batch.

    ``computing_s`` is what its passes took, the fetches that they waited for with them. For ``waiting_s`` its process
    computed none of its stages: it waited for others and until the ``sent_bytes`` had left, which PyTorch's schedules
    wait for together. ``planned`` is None where nothing was measured to choose the stages.
    """

    stage: int
    layers: int
    computing_s: float
    waiting_s: float
    sent_bytes: int
    planned: PlannedStage | None = None

    def rows(self) -> list[tuple[str, str, str]]:
        """Returns the report's lines of it."""
        computing, waiting = format_seconds(self.computing_s), format_seconds(self.waiting_s)
        peak = []
        if self.planned is not None:
            computing += f", planned {format_seconds(self.planned.computing_s)}"
            waiting += f", planned {format_seconds(self.planned.waiting_s)}"
            peak = [("", "planned peak", format_bytes(self.planned.peak_bytes))]
        sending = ("", "waiting, sending", f"{waiting}; {format_bytes(self.sent_bytes)} sent")
        return [(f"stage {self.stage}", "computing", computing), sending, *peak]
