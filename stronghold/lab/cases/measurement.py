"""A run as a case sees it, read from its record."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stronghold.lab.cases.series import check_method
from stronghold.lab.records.hardware import hardware_of
from stronghold.lab.records.json_lines import Record
from stronghold.lab.records.runs import to_float

_USUAL = {"store": "ram", "states": "fp32", "micro_batch": None, "activations": "recompute", "resident": 0}
"""What a stronghold run of a case must not have changed; an older record lacks some, and had no choice."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a trial of case 1 was allowed, in bytes."""

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run or one trial. ``source`` says where it is written.

    ``settings`` are as recorded. ``machine`` is what it ran on, in words. ``low`` and ``high`` are the 10th and 90th
    percentile of ``iteration_s``, the median; all are NaN for a trial that did not train, ``reason`` is then why.
    ``limits`` are a trial's. ``artifact`` tells a log of the paper's artifact. ``note`` is what a reader should know
    of it, ``wrong`` why its losses are not to be trusted.
    """

    source: str
    method: str
    layers: int
    settings: Mapping[str, Any]
    machine: str
    commit: str = ""
    time: str = ""
    parameters: int = 0
    steps: int = 0
    iteration_s: float = math.nan
    low: float = math.nan
    high: float = math.nan
    samples_per_s: float = math.nan
    losses: tuple[float, ...] = ()
    device_bytes: int = 0
    host_bytes: int = 0
    limits: Limits | None = None
    reason: str = ""
    artifact: bool = False
    note: str = ""
    wrong: str = ""

    @property
    def window(self) -> int | None:
        """Stronghold's window; other methods have none, whatever is recorded, nor has "auto" a number."""
        window = self.settings.get("window") if self.method == "stronghold" else None
        return window if isinstance(window, int) else None

    def has(self, shape: Mapping[str, Any]) -> bool:
        """Tells whether its settings are those of ``shape``. What was not recorded yet is taken to be as wanted."""
        wanted = {"path": None, **(_USUAL if self.method == "stronghold" else {}), **shape}
        return all(self.settings.get(name, value) == value for name, value in wanted.items())


def from_record(record: Record, source: str) -> Measurement:
    """Returns a run's record, or a trial's, as a measurement. Raises ValueError saying what it lacks."""
    if "error" in record:
        raise ValueError(f"its run did not succeed: {record['error']}")
    settings, machine = record.get("settings"), record.get("machine", {})
    limits, summary = record.get("limits"), record.get("summary")
    missing = [name for name, value in (("settings", settings), ("machine", machine)) if not isinstance(value, dict)]
    if not isinstance(summary, dict) and limits is None:
        missing.append("summary")
    if missing:
        raise ValueError(f"it has no {' and no '.join(missing)}: a record of another or an older format")
    assert isinstance(settings, dict)
    method = check_method(settings.get("method"))
    if settings.get("path") is None and not isinstance(settings.get("layers"), int):
        raise ValueError("its settings have no layers: a record of another or an older format")
    if limits is not None and (not isinstance(limits, dict) or limits.keys() != {"device_bytes", "host_bytes"}):
        raise ValueError("its limits are not those of device and host: a record of another or an older format")
    try:
        _ = [to_float(loss) for loss in record.get("losses", ())]
    except (TypeError, ValueError) as error:
        raise ValueError(f"its losses are no numbers ({error})") from error
    return Measurement(
        source=source,
        method=method,
        layers=settings.get("layers") or 0,
        settings=settings,
        machine=hardware_of(record),
        commit=str(machine.get("commit") or ""),
        time=str(machine.get("time") or ""),
        parameters=record.get("parameters") or 0,
        limits=None if limits is None else Limits(**limits),
        reason=record.get("reason", ""),
        note="; ".join(["interrupted"] * bool(record.get("interrupted")) + list(record.get("moves", ()))),
        wrong=record.get("wrong") or _unsound(summary or {}),
        **_summary(record, summary or {}, settings),
    )


def _summary(record: Record, summary: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that come from a run's summary; one of a trial that did not train has none of them."""
    if not summary:
        return {"device_bytes": record.get("device_bytes", 0), "host_bytes": record.get("host_bytes", 0)}
    absent = sorted({"iteration_s", "steps"} - summary.keys())
    if absent:
        raise ValueError(f"its summary has no {' and no '.join(absent)}: a record of an older format")
    if not isinstance(settings.get("batch"), int):
        raise ValueError("its settings have no batch: a record of another or an older format")
    iteration_s = float(summary["iteration_s"])
    if not iteration_s > 0:
        raise ValueError(f"its iterations must take time (got iteration_s={iteration_s}); measure it again")
    return {
        "steps": summary["steps"],
        "iteration_s": iteration_s,
        "low": float(summary.get("iteration_s_p10", iteration_s)),
        "high": float(summary.get("iteration_s_p90", iteration_s)),
        "samples_per_s": settings["batch"] / iteration_s,
        "losses": _losses(summary),
        "device_bytes": summary.get("peak_device_bytes") or summary.get("device_bytes", 0),
        "host_bytes": max(summary.get("peak_host_bytes", 0), record.get("host_bytes", 0)),
    }


def _losses(summary: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple(to_float(summary[name]) for name in ("first_loss", "last_loss") if name in summary)


def _unsound(summary: Mapping[str, Any]) -> str:
    """Returns what is wrong with losses that are not even numbers."""
    return next((f"its loss is {loss}" for loss in _losses(summary) if not math.isfinite(loss)), "")
