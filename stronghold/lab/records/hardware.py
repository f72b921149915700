"""What a run was measured on, in words: the one rule that keeps machines apart in figures and tables."""

from collections.abc import Iterator, Mapping
from typing import Any

from stronghold.lab.records.runs import Run
from stronghold.units import format_bytes

NOT_RECORDED = "machine not recorded"


def hardware_of(record: Mapping[str, Any]) -> str:
    """Returns what computed the run of ``record`` and its host; runs are beside one another where it is the same.

    ``record`` has the run's settings and, as ``machine``, what describe_machine told; whatever else they hold is taken
    to be absent. A GPU that was not used is not named, since it changed nothing. Where the device is not recorded all
    are named, and a GPU that was used and is not recorded is said to be: neither run is taken for one of the CPU.
    """
    machine, settings = _mapping(record.get("machine")), _mapping(record.get("settings"))
    host, gpus = _mapping(machine.get("host")), machine.get("gpus")
    listed = [_mapping(gpu) for gpu in gpus] if isinstance(gpus, list) else []
    if not host and not listed:
        return NOT_RECORDED
    words = [_gpu(gpu) for gpu in _used(listed, settings.get("device"))]
    if host:
        words += [str(host.get("processor") or "processor not recorded"), f"{host.get('cores') or '?'} cores"]
        words.append(_bytes(host))
    else:
        words.append("host not recorded")
    return ", ".join(filter(None, words))


def moves_of(run: Run) -> Iterator[str]:
    """Yields, in words, each time that a run went on on another machine: its steps are not of one."""
    before = hardware_of(run.start)
    for resume in run.resumes:
        now = hardware_of(resume)
        if now != before:
            yield f"went on after step {resume.get('step')} on another machine: {now}"
        before = now


def _used(gpus: list[Mapping[str, Any]], device: Any) -> list[Mapping[str, Any]]:
    kind, _, index = str(device or "").partition(":")
    if not kind:
        return gpus
    if kind == "cpu":
        return []
    if kind != "cuda":
        return [{"name": kind}]  # those that are listed are CUDA's
    place = int(index) if index.isdecimal() else 0
    return gpus[place : place + 1] or [{}]


def _gpu(gpu: Mapping[str, Any]) -> str:
    return f"{gpu.get('name') or 'GPU not recorded'} {_bytes(gpu)}".rstrip()


def _bytes(part: Mapping[str, Any]) -> str:
    size = part.get("memory_bytes")
    return format_bytes(size) if isinstance(size, int) else ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
