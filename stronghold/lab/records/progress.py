"""What a run shows while it trains."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from stronghold.lab.records.json_lines import Record
from stronghold.units import format_bytes


class StepDisplay:
    """A progress bar over ``steps``; where there is no terminal, a line for every tenth of them."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._progress = Progress(
            # On a narrow terminal the bar gives way, and not a number.
            TextColumn("{task.completed}/{task.total}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[shown]}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True, min_width=5)),
            TextColumn("left", table_column=Column(min_width=4)),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=steps, shown="")

    def __enter__(self) -> "StepDisplay":
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()

    def step(self, record: Record) -> None:
        """Shows one step's record: loss, tokens per second, peak bytes on the device and of this process, wear."""
        shown = f"loss {record['loss']:.4f} {record['tokens_per_s']:,.0f} tokens/s "
        if device_bytes := record["peak_device_bytes"] or record["device_bytes"]:  # a method may not know
            shown += f"device {format_bytes(device_bytes)} "
        shown += f"host {format_bytes(record['peak_host_bytes'])}"
        if record.get("disk_written_bytes"):
            shown += f" disk {format_bytes(record['disk_written_bytes'])} written"
        step = record["step"]
        if self._console.is_terminal:
            self._progress.update(self._task, completed=step, shown=shown)
        elif step == 1 or step == self._steps or step % max(1, self._steps // 10) == 0:
            self._console.print(f"step {step:>5}/{self._steps}  {shown}", soft_wrap=True)
