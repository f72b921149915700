"""The order in which a pipeline's devices run their forward and backward passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B")
"""As torch.distributed.pipelining.schedules.get_schedule_class knows them."""


class Pass(NamedTuple):
    """The forward or backward pass of one micro-batch through one stage, printed as torch does: ``2F0``, ``2B0``."""

    stage: int
    backward: bool
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{'B' if self.backward else 'F'}{self.micro_batch}"


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A row of stages over ``devices``, and the schedule by which ``micro_batches`` pass through it in a step.

    Stage s is on device s mod ``devices``, so that with ``stages_per_device`` above one a micro-batch goes round.

    - ``GPipe`` (Huang et al. 2019): all forward passes, then all backward passes.
    - ``1F1B`` (Narayanan et al. 2019): stage s of p begins with p - s forward passes, then takes a backward and a
      forward pass in turn, and so never holds more than p - s micro-batches.
    - ``Interleaved1F1B`` (Narayanan et al. 2021): the same over several stages on each device. Micro-batches go in
      rounds of k = micro_batches / max(1, micro_batches // devices), ``devices`` of them where they divide evenly: a
      round's pass through one stage of the device, then through the device's next.

    The order is that of torch.distributed.pipelining, and what its schedules refuse is refused here. Raises ValueError.
    """

    schedule: str
    devices: int
    micro_batches: int
    stages_per_device: int = 1

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)} (got {self.schedule!r})")
        for name in ("devices", "micro_batches", "stages_per_device"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1 (got {value!r}); pass one")
        if self.schedule != "Interleaved1F1B" and self.stages_per_device > 1:
            raise ValueError(
                f"{self.schedule} has one stage on each device (got stages_per_device={self.stages_per_device}); "
                "pass 1, or schedule='Interleaved1F1B'"
            )
        if self.schedule == "1F1B" and self.micro_batches < self.devices:
            raise ValueError(
                f"1F1B needs at least as many micro-batches as stages (got micro_batches={self.micro_batches}, "
                f"stages={self.stages}); pass micro_batches={self.stages}, or schedule='GPipe'"
            )
        if self.schedule == "Interleaved1F1B" and self.micro_batches % self._rounds:
            raise ValueError(
                f"Interleaved1F1B needs micro-batches that divide into {self._rounds} rounds, one for each whole "
                f"multiple of the devices (got micro_batches={self.micro_batches}, devices={self.devices}); pass "
                f"micro_batches={self.micro_batches // self.devices * self.devices}"
            )

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.devices * self.stages_per_device

    def device_of(self, stage: int) -> int:
        """Returns the device that a stage is on."""
        return stage % self.devices

    def stages_of(self, device: int) -> range:
        """Returns the stages on a device, first to last."""
        return range(device, self.stages, self.devices)

    def order(self, device: int) -> Iterator[Pass]:
        """Yields the passes of one device, in the order in which it runs them.

        Device 1 of two under 1F1B with three micro-batches: ``1F0 1B0 1F1 1B1 1F2 1B2``; device 0:
        ``0F0 0F1 0B0 0F2 0B1 0B2``.
        """
        warmup = self._warmup(device)
        forwards, backwards = self._passes(device, backward=False), self._passes(device, backward=True)
        yield from islice(forwards, warmup)
        for forward in forwards:
            yield forward
            yield next(backwards)
        yield from backwards

    def held(self) -> list[int]:
        """Returns for each stage how many micro-batches' activations it holds at the most.

        A micro-batch is held from its forward pass until its backward pass is done. The order alone decides it,
        whatever a pass takes. Stages of one device need not reach their most at the same time.
        """
        most = [0] * self.stages
        for device in range(self.devices):
            now = dict.fromkeys(self.stages_of(device), 0)
            for stage, backward, _ in self.order(device):
                now[stage] += -1 if backward else 1
                most[stage] = max(most[stage], now[stage])
        return most

    @property
    def _rounds(self) -> int:
        return max(1, self.micro_batches // self.devices)

    def _warmup(self, device: int) -> int:
        """Forward passes, where there are as many, before the first one that a backward pass follows at once."""
        after = self.devices - 1 - device
        if self.schedule == "GPipe":
            return self.micro_batches
        if self.schedule == "1F1B":
            return after
        # Two more for each device behind it: an activation's way there, a gradient's way back.
        return (self.stages_per_device - 1) * (self.micro_batches // self._rounds) + 2 * after

    def _passes(self, device: int, *, backward: bool) -> Iterator[Pass]:
        interleaved = self.schedule == "Interleaved1F1B"
        a_round = self.micro_batches // self._rounds if interleaved else self.micro_batches
        stages = self.stages_of(device)
        for first in range(0, self.micro_batches, a_round):
            for stage in reversed(stages) if backward else stages:
                for micro_batch in range(first, first + a_round):
                    yield Pass(stage, backward, micro_batch)
