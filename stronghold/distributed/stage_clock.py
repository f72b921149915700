"""How long each stage of a process computes in a step, and how long the process does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from stronghold.device import Device
from stronghold.planner.partition import Partition, played
from stronghold.planner.pipeline_order import Pipeline
from stronghold.step_times import PlannedStage, StageTimes


class StageClock:
    """Notes when stages begin and end to compute, by the device's own clock, which nothing waits for.

    A step is one :meth:`step` block; what is asked for is the last one that has ended.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._spans: list[tuple[int, object, object]] = []
        self._last: tuple[list[tuple[int, object, object]], object, object] | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Times a step; passes count that are computed inside of the block."""
        self._spans, begin = [], self._device.stamp()
        yield
        self._last, self._spans = (self._spans, begin, self._device.stamp()), []

    @contextmanager
    def computing(self, stage: int) -> Iterator[None]:
        """Says that ``stage`` computes inside of the block."""
        begin = self._device.stamp()
        yield
        self._spans.append((stage, begin, self._device.stamp()))

    def last(
        self, layers: Sequence[int], numbers: Sequence[int], planned: Sequence[PlannedStage], sent_bytes: int
    ) -> tuple[StageTimes, ...]:
        """Returns the times of the stages with these ``numbers`` in the last step, none before the first.

        ``layers`` and what was ``planned``, if anything, are those of all stages. Blocks until the step is computed.
        """
        if self._last is None:
            return ()
        spans, begin, end = self._last
        computing_s = dict.fromkeys(numbers, 0.0)
        for stage, *ends in spans:
            computing_s[stage] += self._device.seconds(*ends)
        waiting_s = max(0.0, self._device.seconds(begin, end) - sum(computing_s.values()))
        return tuple(
            StageTimes(
                stage=number,
                layers=layers[number],
                computing_s=computing_s[number],
                waiting_s=waiting_s,
                sent_bytes=sent_bytes,
                planned=planned[number] if planned else None,
            )
            for number in numbers
        )


def planned_stages(found: Partition, order: Pipeline, link_s: float | Sequence[float]) -> list[PlannedStage]:
    """Returns what each stage of a partition is planned to take in a step; ``link_s`` is as for ``simulate``.

    It computes for all its micro-batches, with what it waits for beside; its process waits for others for the rest of
    the simulated step.
    """
    step = played(found, order, link_s)
    return [
        PlannedStage(
            computing_s=order.micro_batches * one.time_s,
            waiting_s=step.step_s - step.busy_s[order.device_of(number)],
            peak_bytes=one.memory_bytes,
        )
        for number, one in enumerate(found.stages)
    ]
