"""What a model in stages and replicas takes, process by process."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from rich.console import Group
from rich.table import Table

from stronghold.reports import Report
from stronghold.step_times import StepTimes
from stronghold.units import format_bytes, format_count, format_seconds


@dataclass(frozen=True, kw_only=True)
class StagesReport:
    """The reports of all processes; ``parameters`` are the model's, each counted once, of which there are ``replicas``.

    Bytes are sums over the processes, a step's times their means.
    """

    parameters: int
    replicas: int = 1
    reports: tuple[Report, ...]

    @property
    def device_bytes(self) -> int:
        """What is held on all devices between steps."""
        return sum(report.device_bytes for report in self.reports)

    @property
    def peak_device_bytes(self) -> int:
        """The sum of the devices' peaks, 0 where they do not count."""
        return sum(report.peak_device_bytes for report in self.reports)

    @property
    def host_bytes(self) -> int:
        """What is held in host memory."""
        return sum(report.host_bytes for report in self.reports)

    @property
    def disk_bytes(self) -> int:
        """What is on disk."""
        return sum(report.disk_bytes for report in self.reports)

    @property
    def disk_paths(self) -> tuple[str, ...]:
        """Where."""
        return tuple(dict.fromkeys(path for report in self.reports for path in report.disk_paths))

    @property
    def on_root_disk(self) -> bool:
        """Whether some of it is on the system's disk."""
        return any(report.on_root_disk for report in self.reports)

    @property
    def skipped_steps(self) -> int:
        """Steps that all skipped, for gradients that were not finite."""
        return self.reports[0].skipped_steps

    @property
    def step(self) -> StepTimes | None:
        """The last step, None before the first."""
        steps = [report.step for report in self.reports if report.step is not None]
        if len(steps) < len(self.reports):
            return None
        return StepTimes(
            total_s=max(step.total_s for step in steps),
            compute_s=fmean(step.compute_s for step in steps),
            fetch_wait_s=fmean(step.fetch_wait_s for step in steps),
            update_wait_s=fmean(step.update_wait_s for step in steps),
            disk_wait_s=fmean(step.disk_wait_s for step in steps),
            outside_s=max(steps, key=lambda step: step.total_s).outside_s,
            disk_busy_s=fmean(step.disk_busy_s for step in steps),
            fetches=sum(step.fetches for step in steps),
            fetched_bytes=sum(step.fetched_bytes for step in steps),
            gradient_bytes=sum(step.gradient_bytes for step in steps),
            reduced_bytes=sum(step.reduced_bytes for step in steps),
            crossed_bytes=sum(step.crossed_bytes for step in steps),
            disk_read_bytes=sum(step.disk_read_bytes for step in steps),
            disk_written_bytes=sum(step.disk_written_bytes for step in steps),
        )

    def __rich__(self) -> Table | Group:
        processes = self._processes()
        return Group(processes, self._stages()) if any(one.stages for one in self.reports) else processes

    def _stages(self) -> Table:
        """Returns a line for each stage of each replica, its last batch and peak bytes, and below what was planned."""
        result = Table(title="stages in the last batch; waiting is with sending", title_justify="left")
        for name in ("stage", "layers", "", "computing", "waiting", "sent", "peak"):
            result.add_column(name, justify="right", overflow="fold")
        found = [(times, one) for one in self.reports for times in one.stages]
        for times, one in sorted(found, key=lambda each: each[0].stage):
            result.add_row(
                str(times.stage),
                str(times.layers),
                "measured",
                format_seconds(times.computing_s),
                format_seconds(times.waiting_s),
                format_bytes(times.sent_bytes),
                format_bytes(one.peak_device_bytes) if one.peak_device_bytes else "not counted",
            )
            if (planned := times.planned) is not None:
                seconds = map(format_seconds, (planned.computing_s, planned.waiting_s))
                result.add_row("", "", "planned", *seconds, "", format_bytes(planned.peak_bytes))
        return result

    def _processes(self) -> Table:
        result = Table(title="processes", title_justify="left")
        for name in ("process", "layers", "parameters", "window", "device", "host", "disk"):
            result.add_column(name, justify="right", overflow="fold")
        for number, one in enumerate(self.reports):
            result.add_row(
                str(number),
                str(one.layers),
                format_count(one.parameters),
                str(one.window or one.resident),
                format_bytes(one.device_bytes),
                format_bytes(one.host_bytes),
                format_bytes(one.disk_bytes),
            )
        together = (self.device_bytes, self.host_bytes, self.disk_bytes)
        layers = str(sum(one.layers for one in self.reports) // self.replicas)
        result.add_section()
        result.add_row("all", layers, format_count(self.parameters), "", *map(format_bytes, together))
        return result
