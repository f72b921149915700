"""Reads a step out of a trace of torch.profiler, as it exports it: the JSON of Chrome's traces."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trace_spans import Call, Copy, Step, Work, outermost

STEP = "stronghold: step"
"""What the step is annotated with."""
WAIT = "wait "
"""What the names of the engine's waits begin with."""
ON_DEVICE = ("kernel", "gpu_memset", "gpu_memcpy")
ON_HOST = ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation")
WAYS = {"HtoD": "up", "DtoH": "down"}
Event = Mapping[str, Any]


def step_of(events: Sequence[Event], copies: Sequence[Copy] = ()) -> Step:
    """Returns the last step of a trace; microseconds become seconds.

    Where the trace has no kernels, for the computation was on the host, they are the operations of PyTorch, and
    ``copies`` are those that something else has seen. Raises ValueError where no step is annotated.
    """
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    steps = [event for event in spans if event["name"] == STEP and event.get("cat") == "user_annotation"]
    if not steps:
        raise ValueError(f"a trace must have a step that is annotated (got none called {STEP!r}); trace one")
    last = max(steps, key=lambda event: event["ts"])
    begin_s, end_s = _times(last)

    def within(event: Event) -> bool:
        return event["ts"] < last["ts"] + last["dur"] and event["ts"] + event["dur"] > last["ts"]

    spans = [event for event in spans if within(event) and event is not last]
    host = [event for event in spans if event.get("cat") in ON_HOST and event["name"] != STEP]
    calls = [Call(short(event["name"]), *_times(event), event.get("tid")) for event in host]
    waits = [call for call in calls if call.name.startswith(WAIT)]
    device = [event for event in spans if event.get("cat") in ON_DEVICE]
    moved = [event for event in device if _way(event)]
    launches = {c: event for event in host if (c := _argument(event, "correlation")) is not None}
    kernels = [(_argument(event, "stream"), _work(event, launches)) for event in device if not _way(event)]
    if not kernels:
        by_thread: dict[Any, list[Call]] = {}
        for call in calls:
            if call.name.startswith("aten::"):
                by_thread.setdefault(call.thread, []).append(call)
        outer = [call for found in by_thread.values() for call in outermost(found)]
        kernels = [(None, Work(call.name, call.begin_s, call.end_s)) for call in outer]
        calls = [call for call in calls if not call.name.startswith("aten::")]
    else:
        copies = [Copy(_way(event), _argument(event, "bytes") or 0, *_times(event)) for event in moved]
    times: dict[Any, float] = {}
    for stream, work in kernels:
        times[stream] = times.get(stream, 0.0) + work.end_s - work.begin_s
    compute = max(times, key=lambda stream: times[stream], default=None)
    return Step(
        begin_s=begin_s,
        end_s=end_s,
        kernels=_clipped([work for _, work in kernels], begin_s, end_s),
        compute=_clipped([work for stream, work in kernels if stream == compute], begin_s, end_s),
        copies=[copy for copy in copies if copy.end_s > begin_s and copy.begin_s < end_s],
        waits=waits,
        host=[call for call in calls if not call.name.startswith(WAIT)],
    )


def short(name: str, length: int = 56) -> str:
    """Returns a kernel's name without return type, template arguments and parameters, and not longer than that."""
    name = re.sub(r"^void ", "", name).replace("(anonymous namespace)::", "").replace("at::native::", "")
    while "<" in name and (shorter := re.sub(r"<[^<>]*>", "", name)) != name:
        name = shorter
    name = re.sub(r"\(.*", "", name).strip() or name
    return name if len(name) <= length else f"{name[: length - 1]}…"


def _work(event: Event, launches: Mapping[Any, Event]) -> Work:
    launch = launches.get(_argument(event, "correlation"))
    issued = (None, None) if launch is None else (launch["ts"] * 1e-6, launch.get("tid"))
    return Work(short(event["name"]), *_times(event), *issued)


def _way(event: Event) -> str:
    return (
        next((way for name, way in WAYS.items() if name in event["name"]), "") if event["cat"] == "gpu_memcpy" else ""
    )


def _argument(event: Event, name: str) -> Any:
    return event.get("args", {}).get(name)


def _times(event: Event) -> tuple[float, float]:
    return event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6


def _clipped(works: Sequence[Work], begin_s: float, end_s: float) -> list[Work]:
    inside = [w._replace(begin_s=max(w.begin_s, begin_s), end_s=min(w.end_s, end_s)) for w in works]
    return sorted((work for work in inside if work.begin_s < work.end_s), key=lambda work: (work.begin_s, work.end_s))
