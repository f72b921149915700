"""The machines and their runs as tables."""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import chain, groupby
from typing import Any

from stronghold.lab.page.reading import RecordedRun
from stronghold.lab.page.section import Section, table
from stronghold.lab.records.runs import to_float
from stronghold.units import format_bytes, format_count, format_seconds

NOT_RECORDED = "?"


def by_machine(runs: Sequence[RecordedRun]) -> list[tuple[str, list[RecordedRun]]]:
    """Returns runs by what they ran on, and there from the smallest model to the largest, by method, oldest first."""

    def order(run: RecordedRun) -> tuple[Any, ...]:
        parameters = run.parameters if isinstance(run.parameters, int) else 0
        return run.hardware, parameters, str(run.settings.get("method")), run.time, run.name

    ordered = sorted(runs, key=order)
    return [(hardware, list(own)) for hardware, own in groupby(ordered, key=lambda run: run.hardware)]


def machines_section(runs: Sequence[RecordedRun]) -> Section:
    """Returns what the runs ran on; of versions and commits, all that a machine's runs had."""
    parts = []
    for hardware, own in by_machine(runs):
        rows = [(name, ", ".join(values)) for name, values in _facts(own) if values]
        items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(values)}</dd>" for name, values in rows)
        parts.append(f"<h3>{escape(hardware)}</h3><dl>{items}</dl>")
    return Section(title="Machine" if len(parts) == 1 else "Machines", body="".join(parts))


def runs_section(runs: Sequence[RecordedRun]) -> Section:
    """Returns a table for each machine, a run a line."""
    several = len({run.hardware for run in runs}) > 1
    intro = (
        "<p>Iteration times are medians, with the 10th and 90th percentile; TFLOPS count 6·N a token. Device memory is "
        "the peak where the device counts it, else what is held there; host memory is the process's peak. "
        f"WRONG are losses that leave the resident run's. {NOT_RECORDED} is not recorded."
        f"{' Runs of different machines are in tables of their own.' * several}</p>"
    )
    parts = []
    for hardware, own in by_machine(runs):
        parts.append(f"<h3>{escape(hardware)}</h3>" * several)
        parts.append(
            table(list(_COLUMNS), [[escape(_cell(run, cell) or "") for cell in _COLUMNS.values()] for run in own])
        )
    return Section(title="Methods and runs", body=intro + "".join(parts))


def missing_notes(runs: Sequence[RecordedRun]) -> Iterator[str]:
    """Yields a note for each run whose record lacks what the table shows."""
    for run in runs:
        missing = [name for name, cell in _COLUMNS.items() if _cell(run, cell) == NOT_RECORDED]
        if missing:
            yield f"{run.name}: {', '.join(missing)} not recorded, in a record of another or an older form"


def _cell(run: RecordedRun, cell: Callable[[RecordedRun], str]) -> str:
    try:
        return cell(run)
    except (KeyError, TypeError, ValueError):
        return "" if run.failed else NOT_RECORDED


def _facts(runs: Sequence[RecordedRun]) -> Iterator[tuple[str, list[str]]]:
    """Yields what is known of the runs' machine, and the values that it had."""
    for name, path in (
        ("system", ("host", "system")),
        *((name, ("versions", name)) for name in ("stronghold", "torch", "cuda", "transformers", "python")),
        ("threads", ("threads",)),
    ):
        yield name, list(dict.fromkeys(chain.from_iterable(_value(run.machine, path) for run in runs)))
    yield "commits", list(dict.fromkeys(_cell(run, _COLUMNS["commit"]) for run in runs))
    yield "runs", [str(len(runs))]


def _value(machine: Any, path: Sequence[str]) -> Iterator[str]:
    for name in path:
        machine = machine.get(name) if hasattr(machine, "get") else None
    if machine is not None:
        yield str(machine)


def _model(run: RecordedRun) -> str:
    settings = run.settings
    folder = settings.get("path") or settings.get("model")  # as train names it, and as finetune does
    shape = folder or f"{settings['layers']} x {settings['hidden']}"
    return f"{format_count(run.parameters)} ({shape})"


def _window(run: RecordedRun) -> str:
    """Other methods have no window, whatever their settings say."""
    return str(run.settings["window"]) if run.settings.get("method") in ("stronghold", "stronghold finetune") else ""


def _iteration(run: RecordedRun) -> str:
    low, high = (format_seconds(run.summary[f"iteration_s_p{percent}"]) for percent in (10, 90))
    return f"{format_seconds(run.summary['iteration_s'])} ({low} to {high})"


def _steps(run: RecordedRun) -> str:
    settings = run.settings
    most = "up to " if run.summary.get("step_tokens") is not None else ""  # samples are as long as their rows
    return f"{run.summary['steps']} of {run.summary.get('batch', settings['batch'])} x {most}{settings['sequence']:,}"


def _device_memory(run: RecordedRun) -> str:
    peak, held = run.summary["peak_device_bytes"], run.summary["device_bytes"]
    return format_bytes(peak) if peak else f"{format_bytes(held)} held" if held else "not told"


def _loss(run: RecordedRun) -> str:
    first, last = (to_float(run.summary[name]) for name in ("first_loss", "last_loss"))
    return f"{first:.4f} → {last:.4f}{' WRONG' * bool(run.wrong)}"


_COLUMNS: dict[str, Callable[[RecordedRun], str]] = {
    "run": lambda run: run.name,
    "method": lambda run: str(run.settings["method"]),
    "model": _model,
    "window": _window,
    "samples/s": lambda run: f"{run.summary['samples_per_s']:.4g}",
    "iteration": _iteration,
    "device memory": _device_memory,
    "host memory": lambda run: format_bytes(run.summary["peak_host_bytes"]),
    "loss": _loss,
    "steps": _steps,
    "tokens/s": lambda run: f"{run.summary['tokens_per_s']:,.0f}",
    "TFLOPS": lambda run: f"{run.summary['tflops']:.4g}",
    "device": lambda run: str(run.settings["device"]),
    "dtype": lambda run: str(run.settings["dtype"]),
    "store": lambda run: "ram" if run.settings["store"] == "ram" else "disk",
    "states": lambda run: str(run.settings["states"]),
    "ended": lambda run: run.ended,
    "began (UTC)": lambda run: run.time[:16].replace("T", " ") or NOT_RECORDED,
    "commit": lambda run: _commit(run.machine["commit"]),
}


def _commit(commit: Any) -> str:
    """Returns a commit as short as people write it, and that files were changed."""
    if commit is None:
        return "none"
    name, *changed = str(commit).split("-")
    return "-".join([name[:10], *changed])
