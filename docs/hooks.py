"""What mkdocs builds beside the pages: the schedule's picture, figures of results, and every command's help."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from stronghold.lab import cli
from stronghold.schedule import trace

ROOT = Path(__file__).parents[1]
FIGURES = ("states.png", "case1_cpu.png", "case2_cpu.png", "case3_cpu.png", "case4_cpu.png", "case5_cpu.png")
COMMANDS = ("probe", "plan", "train", "finetune", "plot", "report", "trace", "partition")
PASSES = ["forward", "backward", "step", "forward"]


def on_files(files: Files, config: Any) -> Files:
    """Adds the figures; what is under results/ is not copied into docs/."""
    for name in FIGURES:
        content = (ROOT / "results" / name).read_bytes()
        files.append(File.generated(config, f"results/{name}", content=content))
    files.append(File.generated(config, "schedule.svg", content=schedule_svg(4, 2)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Puts each command's help in its place."""
    if page.file.src_uri == "reference/command-line.md":
        helps = (f"## stronghold {name}\n\n```\n{_help(name)}```\n" for name in COMMANDS)
        return markdown.replace("<!-- commands -->", "\n".join(helps))
    return markdown


def schedule_svg(layers: int, window: int) -> str:
    """Draws what :func:`stronghold.schedule.trace` prints: which layer each slot holds, and what computes."""
    wide, high, left, top = 36, 30, 84, 12
    slots: list[int | None] = [None] * window
    begun: dict[int, float] = {}
    boxes: list[tuple[int, float, float, str, str]] = []
    now = 0.0
    for move in trace(layers, window, PASSES).split():
        action, layer = move[0], int(move[1:])
        if action == "C":
            boxes.append((0, now, now + 1, str(layer), "#6b8fb5"))
            now += 1
        elif action == "F":
            slots[slots.index(None)] = layer
            begun[layer] = now
        else:
            lane = slots.index(layer)
            slots[lane] = None
            boxes.append((1 + lane, begun[layer], now, str(layer), "#d9c79a"))
    boxes += [
        (1 + lane, begun[layer], now, str(layer), "#d9c79a") for lane, layer in enumerate(slots) if layer is not None
    ]
    width, height = left + wide * now + 10, top + high * (window + 1) + 26
    marks = [("forward", 0.0), ("backward", float(layers)), ("step, forward", 2.0 * layers)]
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
    ]
    for lane, name in enumerate(["computes", *(f"slot {number}" for number in range(window))]):
        drawn.append(f'<text x="8" y="{top + high * lane + 19}">{name}</text>')
    for lane, begin, end, label, colour in boxes:
        if end == begin:
            continue
        x, y, length = left + wide * begin, top + high * lane, wide * (end - begin)
        drawn.append(
            f'<rect x="{x + 1:g}" y="{y + 2}" width="{length - 2:g}" height="{high - 6}" fill="{colour}"/>'
            f'<text x="{x + length / 2:g}" y="{y + 19}" text-anchor="middle">{label}</text>'
        )
    for name, at in marks:
        x = left + wide * at
        drawn.append(f'<line x1="{x:g}" y1="4" x2="{x:g}" y2="{height - 22}" stroke="#999" stroke-dasharray="3 3"/>')
        drawn.append(f'<text x="{x + 3:g}" y="{height - 8}" fill="#555">{name}</text>')
    return "\n".join([*drawn, "</svg>"])


def _help(command: str) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        cli.main([command, "--help"])
    return shown.getvalue()
