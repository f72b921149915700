"""What is said of a run before it starts."""

from __future__ import annotations

from stronghold.lab.finetuning.encoded import Encoded
from stronghold.lab.finetuning.settings import FinetuneSettings
from stronghold.reports import Report
from stronghold.units import format_bytes, format_count, format_seconds


def data_line(name: str, source: str, found: Encoded) -> str:
    """Returns the line that says what was read."""
    rest = f", {found.cut:,} of them cut" if found.cut else ""
    rest += f", {found.skipped:,} others skipped, which are longer" if found.skipped else ""
    return (
        f"{name:<10} {source}: {found.rows:,} rows, {found.tokens:,} tokens, {found.learned:,} of them learned; the "
        f"longest has {found.longest:,}{rest}"
    )


def before_rows(settings: FinetuneSettings, placed: Report, *, steps: int, done: int) -> list[tuple[str, str, str]]:
    """Returns the lines of the plan: (section, name, value); ``done`` of the ``steps`` are so already."""
    course, adapters, planned = settings.course, settings.adapters, placed.planned
    trained = format_count(placed.trainable_parameters)
    if adapters is None:
        what = f"all {trained} parameters"
    else:
        where = f"of {adapters.path}" if adapters.path else f"of rank {adapters.rank} at {', '.join(adapters.targets)}"
        what = f"LoRA {where}: {trained} of {format_count(placed.parameters)} parameters"
    samples = f"{settings.accumulate} x {settings.batch}" if settings.accumulate > 1 else f"{settings.batch}"
    kind = f"packed samples of {settings.sequence:,} tokens" if settings.data.packing else "rows"
    options = "".join(f", {name} {value}" for name, value in course.scheduler_options.items())
    warmup = f", warm-up {course.warmup:g}" if course.warmup else ""
    clip = f"clipped at {course.max_grad_norm:g}" if course.max_grad_norm else "not clipped"
    resident = f", {placed.resident} resident" if placed.resident else ""
    rows = [
        ("model", "", settings.model),
        ("", "trains", what),
        ("", "computes in", f"{settings.dtype} on {placed.device}"),
        ("steps", "", f"{steps:,} of {samples} {kind}" + (f", {done:,} of them done" if done else "")),
        ("", "loss", "of all tokens" if settings.data.loss == "all" else "of completions"),
        ("", "AdamW", f"lr {course.lr:g}, {course.scheduler}{options}{warmup}; gradients {clip}"),
        ("memory", "layers", f"{placed.layers}{resident}, {placed.window} at a time"),
        *([("", "experts in a part", f"{placed.experts_per_part}")] if placed.experts_per_part else []),
        ("", "device", f"{format_bytes(placed.device_bytes)}, and activations"),
        ("", "host", format_bytes(placed.host_bytes)),
        *([("", "disk", format_bytes(placed.disk_bytes))] if placed.disk_bytes else []),
    ]
    if planned is not None:
        step = planned.of_passes(settings.accumulate)
        between = f"{format_seconds(step.low_s)} to {format_seconds(step.high_s)}"
        rows += [
            ("planner", "settings", planned.chosen),
            ("", "why", planned.reason),
            ("", "a full step", f"{format_seconds(step.likely_s)} ({between})"),
            ("", "all steps", f"{format_seconds((steps - done) * step.likely_s)}, if all were full"),
        ]
    rows.append(("output", "", settings.out))
    every = settings.checkpoint_every
    rows.append(("", "checkpoints", f"every {every:,} steps, and on Ctrl-C" if every else "on Ctrl-C"))
    rows.append(("", "adapters" if adapters else "model", settings.save))
    return rows
