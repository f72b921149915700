"""Runs as `stronghold train` records them, with made-up numbers."""

import json
from pathlib import Path

GIB = 1024**3
EPYC = {"processor": "EPYC", "cores": 2, "memory_bytes": 24 * GIB, "system": "Linux"}
ARM = {"processor": "Arm", "cores": 8, "memory_bytes": 16 * GIB, "system": "Linux"}


def machine(host=EPYC, time="2026-11-21T10:00:00+00:00", gpus=()):
    return {
        "time": time,
        "host": host,
        "gpus": list(gpus),
        "versions": {"python": "3.11.7", "torch": "2.13.0", "cuda": None, "stronghold": "0.1.0"},
        "threads": 2,
        "commit": "0123456789abcdef0123456789abcdef01234567-dirty",
    }


def start(name, **machine_options):
    settings = {
        **{"method": "stronghold", "path": None, "layers": 4, "hidden": 64, "window": 2, "store": "ram"},
        **{"states": "fp32", "device": "cpu", "dtype": "fp32", "batch": 2, "sequence": 32, "out": f"runs/{name}"},
    }
    return {"settings": settings, "machine": machine(**machine_options), "parameters": 1_234_567}


def step(number, loss=3.0):
    return {
        **{"event": "step", "step": number, "loss": loss, "iteration_s": 0.5, "device_bytes": GIB},
        **{"peak_device_bytes": 0, "peak_host_bytes": 2 * GIB},
    }


def summary(steps=3):
    return {
        **{"method": "stronghold", "parameters": 1_234_567, "steps": steps, "batch": 2, "sequence": 32},
        **{"iteration_s": 0.5, "iteration_s_p10": 0.4, "iteration_s_p90": 0.6, "samples_per_s": 4.0},
        **{"tokens_per_s": 128.0, "tflops": 0.25, "tflops_with_recomputation": 0.3, "device_bytes": GIB},
        **{"peak_device_bytes": 0, "peak_host_bytes": 2 * GIB, "first_loss": 4.0, "last_loss": 3.0},
    }


def write_log(results, name, *, steps=3, end=True, more=(), losses=None, **machine_options):
    """Writes a run's folder into the runs/ of ``results``, and returns it."""
    records = [{"event": "start", **start(name, **machine_options)}]
    records += [step(number, *([losses[number - 1]] if losses else [])) for number in range(1, steps + 1)]
    records += [*more, *([{"event": "end", "interrupted": False, "summary": summary(steps)}] if end else [])]
    return write_lines(Path(results) / "runs" / name / "log.jsonl", records).parent


def record(name, **machine_options):
    """Returns a run's line in runs.jsonl."""
    return {**start(name, **machine_options), "summary": summary(), "interrupted": False}


def write_lines(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in records))
    return path
