"""Logs in the format of the paper's artifact: what Megatron-LM and DeepSpeed of 2022 print."""

import math
import re
import statistics
from pathlib import Path
from typing import Any

from stronghold.lab.cases.measurement import Measurement
from stronghold.lab.cases.series import check_method
from stronghold.lab.records.hardware import NOT_RECORDED

# "  num_layers ..................................... 32", from the list of arguments that both print first.
_ARGUMENT = re.compile(r"^\s+(\w+) \.{2,} (.+?)\s*$|^\s+(\w+)  (\S+)\s*$", re.MULTILINE)
_NAME = re.compile(r"log_(?P<method>.+?)_l-(?P<layers>\d+)_hs?-(?P<hidden>\d+)_bs-(?P<batch>\d+)_ws-(?P<window>\d+)_")
_ITERATION = re.compile(r"iteration\s+(\d+)/\s*(\d+) \|.*?elapsed time per iteration \(ms\): ([\d.]+)(.*)")
_LOSS = re.compile(r"lm loss: (\S+)")
_NOT_A_NUMBER = re.compile(r"number of nan iterations:\s+[1-9]|grad norm: nan")
_RATE = re.compile(r"SamplesPerSec(?:ond: |=)([\d.]+)")
_PARAMETERS = re.compile(r"total parameters ([\d.]+) B")
_DEVICE_MB = re.compile(r"\bmax allocated: ([\d.]+)")
"""Of Megatron-LM's "memory (MB)" line, which counts in 2**20 bytes."""
_DEVICE_GB = re.compile(r"\bMax_MA ([\d.]+) GB")
"""Of DeepSpeed's see_memory_usage, which counts in 2**30 bytes."""
_EXACT = re.compile(r"model parallel rank \(\d+, \d+\): (\d+)")


def is_artifact_log(text: str) -> bool:
    """Tells a log of the artifact, however much of it is there, from any other text."""
    return bool(_ITERATION.search(text) or _RATE.search(text) or re.search(r"^-+ arguments -+$", text, re.MULTILINE))


def read_artifact_log(path: Path, text: str) -> Measurement:
    """Returns the run that a log tells of. Raises ValueError saying what it lacks.

    Its settings are those that the program printed; what it did not print is taken from the log's name, and said. Times
    are means of ten iterations: the first is left out of their median where others follow.
    """
    text = text[: text.rfind("\n") + 1]  # a last line without its end may end within a number
    printed = _printed_settings(text)
    named = _named_settings(path.name)
    settings = {**named, **printed}
    if unknown := [name for name in ("method", "layers", "hidden", "batch") if name not in settings]:
        raise ValueError(f"neither the log nor its name says {', '.join(unknown)}")
    method = check_method(settings.pop("method"))
    notes = [
        f"{name} is {printed[name]} in the log and {value} in its name: the log counts"
        for name, value in named.items()
        if printed.get(name, value) != value
    ]
    if absent := [name for name in named if name not in printed and name != "window"]:
        notes.append(f"{', '.join(absent)} by its name alone")
    lines = [(int(at), int(of), float(ms) / 1e3, rest) for at, of, ms, rest in _ITERATION.findall(text)]
    rates = [float(rate) for rate in _RATE.findall(text)]
    if not lines and not rates:
        raise ValueError("it was cut short before its first ten iterations, or has another format")
    if lines and lines[-1][0] < lines[-1][1]:
        notes.append(f"cut short after iteration {lines[-1][0]} of {lines[-1][1]}")
    times = [seconds for _, _, seconds, _ in lines] or [settings["batch"] / rate for rate in rates]
    timed = times[1:] or times
    losses = tuple(_loss(rest) for _, _, _, rest in lines)
    exact, rounded = _EXACT.search(text), _PARAMETERS.search(text)
    return Measurement(
        source=str(path),
        method=method,
        layers=settings["layers"],
        settings=settings,
        machine=NOT_RECORDED,
        parameters=int(exact[1]) if exact else round(float(rounded[1]) * 1e9) if rounded else 0,
        steps=lines[-1][0] if lines else 0,
        iteration_s=statistics.median(timed),
        low=min(timed),
        high=max(timed),
        samples_per_s=settings["batch"] / statistics.median(timed),
        losses=losses,
        device_bytes=_device_bytes(text),
        artifact=True,
        note="; ".join(notes),
        wrong="" if all(map(math.isfinite, losses)) else "its loss is nan",
    )


def _device_bytes(text: str) -> int:
    """Returns the most that the log says was allocated on the device, or 0 where it does not say."""
    seen = [float(found) * 2**20 for found in _DEVICE_MB.findall(text)]
    seen += [float(found) * 2**30 for found in _DEVICE_GB.findall(text)]
    return round(max(seen, default=0))


def _printed_settings(text: str) -> dict[str, Any]:
    """Returns the settings in the list of arguments, by the names that our records have for them."""
    given = {a or c: b or d for a, b, c, d in _ARGUMENT.findall(text)}
    found: dict[str, Any] = {}
    for name, ours in (
        ("num_layers", "layers"),
        ("hidden_size", "hidden"),
        ("num_attention_heads", "heads"),
        ("seq_length", "sequence"),
        ("batch_size", "batch"),
        ("global_batch_size", "batch"),
        ("gl_window_size", "window"),
    ):
        if given.get(name, "").isdigit():
            found[ours] = int(given[name])
    if "num_layers" in given:
        found["method"] = _printed_method(given)
    if "params_dtype" in given:
        found["dtype"] = {"torch.float32": "fp32", "torch.bfloat16": "bf16"}.get(given["params_dtype"], "fp16")
    return found


def _printed_method(given: dict[str, str]) -> str:
    """Returns which of the artifact's programs printed these arguments."""
    if given.get("enable_gl") == "True":
        return "stronghold"
    if given.get("enable_l2l") == "True":
        return "l2l"
    if given.get("deepspeed") != "True":
        return "megatron-lm"
    if given.get("zero_stage") == "2":
        return "zero-offload"
    return "zero-infinity-nvme" if "nvme" in given.get("deepspeed_config", "") else "zero-infinity"


def _named_settings(name: str) -> dict[str, Any]:
    match = _NAME.match(name)
    if match is None:
        return {}
    found: dict[str, Any] = {key: value if key == "method" else int(value) for key, value in match.groupdict().items()}
    if found["method"] != "stronghold":
        del found["window"]  # run.sh puts its default into every name
    return found


def _loss(rest: str) -> float:
    """Returns the loss of an iteration's line, which Megatron-LM leaves out when it is not a number."""
    loss = _LOSS.search(rest)
    return math.nan if loss is None or _NOT_A_NUMBER.search(rest) else float(loss[1])
