"""Steps of one training loop: timed in turns with another's, and traced."""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from loops import Loop, batches_of
from probe_parts import synchronize
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities
from trace_events import STEP, WAIT, step_of
from trace_settings import Shape
from trace_spans import Copy, summary

import stronghold
from stronghold.device import Event, Wait, Waits

BATCHES = 8
LANES = {"fetches": "up", "gradients": "down"}


@contextmanager
def named_waits() -> Iterator[None]:
    """Has the engine's waits annotated in a profiler's trace, by their names."""

    def named(method: Callable[..., None]) -> Callable[..., None]:
        def wait(self: Waits, event: Event | None, reason: Wait) -> None:
            with record_function(f"{WAIT}{reason.name}"):
                method(self, event, reason)

        return wait

    with (
        mock.patch.object(Waits, "compute", named(Waits.compute)),
        mock.patch.object(Waits, "host", named(Waits.host)),
    ):
        yield


class Turns:
    """Steps of one loop, as many at a time as are asked for; ``losses`` are those of all its steps so far."""

    def __init__(self, loop: Loop, batch: int, shape: Shape, device: torch.device) -> None:
        self.loop, self.losses = loop, []
        self._device = device
        made = batches_of(batch, shape.sequence, shape.vocabulary, device)
        # On the device beforehand: a copy from pageable memory would have each step wait for the one before.
        self._batches = cycle(list(islice(made, BATCHES)))

    def step(self) -> Tensor:
        loss = self.loop.step(next(self._batches))
        self.losses.append(loss)
        return loss

    def timed(self, steps: int) -> float:
        """Returns the seconds of a step, in the mean of ``steps`` behind one that is not counted."""
        self.step()
        synchronize(self._device)
        begin_s = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize(self._device)
        took_s = (time.perf_counter() - begin_s) / steps
        self.settle()
        return took_s

    def settle(self) -> None:
        """Waits for the host's updates, so that the other loop's turn does not share the host with them."""
        if hasattr(self.loop.optimizer, "wait"):
            self.loop.optimizer.wait()
        synchronize(self._device)

    def first_losses(self, count: int) -> list[float]:
        return [loss.item() for loss in islice(self.losses, count)]


def traced(turns: Turns, device: torch.device, keep: Path | None) -> dict[str, Any]:
    """Traces one step behind another, and returns what it comes to."""
    wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & supported_activities()
    copies: list[Copy] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        turns.step()
        with named_waits(), profile(activities=list(wanted)) as profiled:
            turns.step()  # the profiler's own beginning
            synchronize(device)
            if turns.loop.report() is None:
                _annotated(turns, device)
            else:
                with stronghold.trace(turns.loop.model) as timeline:
                    begin_s = _annotated(turns, device)
                    turns.settle()
                spans = timeline.spans()
                origin_s = timeline._host_origin_s - begin_s  # the timeline's beginning, from the step's
                copies = [
                    Copy(LANES[span.lane], 0, span.begin_s + origin_s, span.end_s + origin_s)
                    for span in spans
                    if span.lane in LANES
                ]
        profiled.export_chrome_trace(str(path))
        text = path.read_bytes()
    if keep is not None:
        keep.parent.mkdir(parents=True, exist_ok=True)
        keep.write_bytes(gzip.compress(text, compresslevel=3))
    events = json.loads(text)["traceEvents"]
    begins = [event["ts"] for event in events if event.get("name") == STEP and event.get("cat") == "user_annotation"]
    at_s = max(begins) * 1e-6
    copies = [one._replace(begin_s=one.begin_s + at_s, end_s=one.end_s + at_s) for one in copies]
    return summary(step_of(events, copies))


def _annotated(turns: Turns, device: torch.device) -> float:
    begin_s = time.perf_counter()
    with record_function(STEP):
        turns.step()
        synchronize(device)
    return begin_s
