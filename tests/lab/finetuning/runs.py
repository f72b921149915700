"""Runs of small models, with the losses that they logged. Holds no tests."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from stronghold.lab.finetuning.run import finetune
from stronghold.lab.finetuning.settings import AdapterSettings, CourseSettings, FinetuneSettings, RowSettings
from stronghold.settings import OffloadSettings
from tests.lab.finetuning import small

LORA = AdapterSettings(rank=4, alpha=8.0, lora_dropout=0.1)
PAIRS = [{"prompt": f"{small.words(row, 3)} ", "completion": small.words(row, 1 + row % 3, 2)} for row in range(12)]


def settings(place: Path, rows: list[Any] | None = None, **more: Any) -> FinetuneSettings:
    """Returns the settings of a run in ``place``, whose model and data are made there."""
    if not (place / "model").exists():
        small.folder(place / "model")
    data = small.write_lines(place / "data.jsonl", PAIRS if rows is None else rows)
    made = FinetuneSettings(
        model=str(place / "model"),
        data=RowSettings(data=str(data)),
        course=CourseSettings(lr=3e-3, weight_decay=0.1, warmup=2),
        offload=OffloadSettings(window=1),
        plans=False,
        sequence=40,
        batch=2,
        epochs=2.0,
        seed=3,
        out=str(place / "run"),
        save=str(place / "run" / "model"),
    )
    return replace(made, **more)


def run(wanted: FinetuneSettings) -> str:
    """Trains and returns what was shown."""
    shown = io.StringIO()
    finetune(wanted, console=Console(file=shown, width=120))
    return shown.getvalue()


def records(wanted: FinetuneSettings, event: str) -> list[dict[str, Any]]:
    lines = (Path(wanted.out) / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def losses(wanted: FinetuneSettings) -> list[float]:
    return [record["loss"] for record in records(wanted, "step")]
