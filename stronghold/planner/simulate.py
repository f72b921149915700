"""How long a pipeline's step takes: its passes played as events, without devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stronghold.planner.pipeline_order import Pass, Pipeline
from stronghold.spans import Span


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What one step came to: seconds from the first pass on, and micro-batches, by device.

    ``ends_s`` is when a device's last pass ends, ``busy_s`` the time that it computed. ``held`` counts the pairs of a
    stage and a micro-batch whose activations a device holds at once, at the most.
    """

    ends_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    held: tuple[int, ...]

    @property
    def step_s(self) -> float:
        """Seconds until the last device is done."""
        return max(self.ends_s)

    @property
    def bubble(self) -> float:
        """The share of all devices' time in which they wait: 1 - busy / (devices · step), 0 of a step without time."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.step_s) if self.step_s else 0.0


def simulate(
    pipeline: Pipeline,
    forward_s: float | Sequence[float],
    backward_s: float | Sequence[float],
    link_s: float | Sequence[float] = 0.0,
    spans: list[Span] | None = None,
) -> Simulation:
    """Plays one step in which each stage takes ``forward_s`` and ``backward_s`` for a micro-batch.

    Each is one number for all stages or one for each. ``link_s`` is what the activation behind a stage takes to the
    next one, and its gradient back: one number, or one for each boundary (stages - 1).

    A device runs its passes in the pipeline's order, each as soon as its input is there. A transfer leaves when its
    pass has ended and those that the device sent the same way before have arrived; devices compute meanwhile, and
    each direction of a link is one of its own. No transfer waits for its receiver to be ready, so that a library that
    posts a receive late can only be slower. Between stages of one device nothing is transferred.

    For p devices, v stages on each and m micro-batches, all passes alike and links that take no time, the bubble is
    (p - 1) / (m + p - 1) with GPipe and 1F1B, and (p - 1) / (v·m + p - 1) with Interleaved1F1B where p divides m
    (Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021).

    Each pass is appended to ``spans``, where they are given, in the lane of its process.

    Raises ValueError for times that are negative or not as many as there are stages.
    """
    stages, devices = pipeline.stages, pipeline.devices
    times_s = (_for_each(forward_s, stages, "forward_s", "stage"), _for_each(backward_s, stages, "backward_s", "stage"))
    boundary_s = _for_each(link_s, stages - 1, "link_s", "boundary between stages")
    orders = [pipeline.order(device) for device in range(devices)]
    upcoming: list[Pass | None] = [next(order) for order in orders]
    ends_s, busy_s, now, most = [0.0] * devices, [0.0] * devices, [0] * devices, [0] * devices
    arrived_s: list[dict[Pass, float]] = [{} for _ in range(devices)]  # inputs that no pass has taken yet
    link_free_s: dict[tuple[int, int], float] = {}
    ready = list(range(devices))
    while ready:
        device = ready.pop()
        while (this := upcoming[device]) is not None:
            stage, backward, micro_batch = this
            if stage == (stages - 1 if backward else 0):
                input_s = 0.0
            elif this in arrived_s[device]:
                input_s = arrived_s[device].pop(this)
            else:
                break
            taken_s = times_s[backward][stage]
            end_s = ends_s[device] = max(ends_s[device], input_s) + taken_s
            busy_s[device] += taken_s
            if spans is not None:
                spans.append(Span(lane_of(device), _name(this, pipeline), end_s - taken_s, end_s))
            now[device] += -1 if backward else 1
            most[device] = max(most[device], now[device])
            upcoming[device] = next(orders[device], None)
            then = Pass(stage - 1 if backward else stage + 1, backward, micro_batch)
            if not 0 <= then.stage < stages:
                continue
            receiver = pipeline.device_of(then.stage)
            if receiver != device:
                # A device's sends leave in the order of its passes, so each direction is a queue that it alone fills.
                leaves_s = max(end_s, link_free_s.get((device, receiver), 0.0))
                end_s = link_free_s[device, receiver] = leaves_s + boundary_s[min(stage, then.stage)]
                if upcoming[receiver] == then:
                    ready.append(receiver)
            arrived_s[receiver][then] = end_s
    assert not any(upcoming), "passes that wait for one another"
    return Simulation(ends_s=tuple(ends_s), busy_s=tuple(busy_s), held=tuple(most))


def lane_of(device: int) -> str:
    """Returns what timelines call a device of a pipeline, which a process has for itself."""
    return f"process {device}"


def _name(one: Pass, pipeline: Pipeline) -> str:
    of = f" of stage {one.stage}" if pipeline.stages_per_device > 1 else ""
    return f"{'backward' if one.backward else 'forward'} {one.micro_batch}{of}"


def _for_each(value: float | Sequence[float], count: int, name: str, what: str) -> list[float]:
    values = [float(x) for x in value] if isinstance(value, Sequence) else [float(value)] * count
    if len(values) != count or not all(0 <= x < float("inf") for x in values):
        raise ValueError(
            f"{name} must be one number of seconds, or one for each {what} ({count}), none negative (got {value!r}); "
            "pass as many"
        )
    return values
