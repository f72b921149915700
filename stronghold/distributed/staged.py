"""A model in stages, one process for each or for several: what is here, and how micro-batches pass through."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.distributed.drawing import as_within
from stronghold.distributed.facts import facts_of
from stronghold.distributed.layered_model import LayeredModel
from stronghold.distributed.processes import Processes
from stronghold.distributed.same_batch import check_same_batch, kind_of
from stronghold.distributed.shapes import Shapes
from stronghold.distributed.stage_clock import StageClock
from stronghold.distributed.tied import Tied
from stronghold.distributed.trained import Trained
from stronghold.engine import engine_of, follow, keep_activations, offload_shared
from stronghold.errors import ParallelError
from stronghold.formats.kept_in_fp32 import keep_in_fp32, mark_kept_in_fp32
from stronghold.planner.pipeline_order import Pipeline
from stronghold.settings import OffloadSettings
from stronghold.step_times import PlannedStage, StageTimes
from stronghold.unit import unit_of
from stronghold.weights import Weights


class StagedModule(nn.Module):
    """This process's stages of a model, offloaded; its parameters are theirs, by their names in the whole model.

    ``sizes`` are the layers of each stage of ``order``, and ``recomputed`` how many of them, from the stage's end, run
    again in the backward pass while the others keep what autograd saves; without it all do what the settings say. All
    processes call the same methods in the same order, with the same batches, of which each replica computes its part;
    what the processes of one compute together follows the schedules of torch.distributed.pipelining. Raises
    ParallelError where the processes do not agree on the model or its settings, and what ``stronghold.offload`` raises.
    """

    def __init__(
        self,
        layered: LayeredModel,
        sizes: Sequence[int],
        order: Pipeline,
        processes: Processes,
        *,
        recomputed: Sequence[int] | None = None,
        planned: Sequence[PlannedStage] = (),
        dtype: torch.dtype | None = None,
        weights: Weights | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        mark_kept_in_fp32(layered.model)  # by its own list, which a stage has not
        if weights is not None and not callable(weights):
            keep_in_fp32(layered.model)
        self._names = {id(module): name for name, module in layered.model.named_modules()}
        self._register_state_dict_hook(_to_names)
        self._register_load_state_dict_pre_hook(self._from_names)
        self._order, self._processes, self._device = order, processes, processes.device
        self._loss = layered.loss
        own = {"partition": list(sizes), "schedule": str(order), "replicas": processes.world_size // processes.each}
        processes.agree({**facts_of(layered.model, dtype, settings), **own})
        stages = [layered.stage(first, end) for first, end in pairwise([0, *accumulate(sizes)])]
        self._shapes = Shapes(stages, dtype)
        self._numbers = order.stages_of(processes.place)
        self._tied = Tied(stages, order, processes, layered.model)
        self._schedules: dict[bool, tuple[tuple[Any, ...], Any]] = {}
        """The library's for training and for evaluation, with the shapes that it was made for."""
        self._sent: Counter[int] = Counter()
        self._sizes, self._planned, self._sent_bytes = list(sizes), planned, 0
        self.chunks = nn.ModuleList(stages[number] for number in self._numbers)
        # By this name transformers' models say what of a checkpoint is not theirs; here it is what others have.
        others = layered.model.state_dict().keys() - set(self._renamed().values())
        self._keys_to_ignore_on_load_unexpected = [f"^{re.escape(name)}$" for name in sorted(others)]
        self._names_of_shared = self._tied.names  # by each of them a folder of weights may have one
        if callable(weights):
            weights = as_within(layered.model, weights)
        if directories := OffloadSettings(store=settings.get("store", "ram")).directories:
            settings["store"] = processes.folders(directories)
        if isinstance(settings.get("window"), int):  # a process may have fewer layers than the others
            settings["window"] = min(settings["window"], sum(sizes[number] for number in self._numbers))
        containers = [f"chunks.{i}{layered.container and '.'}{layered.container}" for i in range(len(self.chunks))]
        processes.run_on_all(
            lambda: offload_shared(
                self,
                processes.replicas,
                device=self._device,
                dtype=dtype,
                layers=containers,
                weights=weights,
                shared=list(self._tied.shared),
                **settings,
            )
        )
        self._check_tied()
        engine = engine_of(self)
        assert engine is not None
        self._tied.begin_alike(engine)
        self._clock = StageClock(engine.device)
        engine.join(
            processes,
            shared=self._tied.shared,
            copies=self._tied.copies if processes.replica == 0 else self.parameters(),
            model=type(layered.model).__name__,
            passes=order.micro_batches,
            here=processes.local_world_size,
            check_step=self._tied.check_step,
        )
        processes.draw_apart()
        if recomputed is not None:
            cuts = zip(sizes, accumulate(sizes), recomputed, strict=True)
            keep_activations(
                engine, [layer for n, end, again in cuts for layer in layered.layers[end - n : end - again]]
            )
        parts = dict(zip(self._numbers, self.chunks, strict=True))
        self._trained = Trained(parts, self._tied.uses)
        follow(engine, [(parts[one.stage], one.backward) for one in order.order(processes.place)])

    def _check_tied(self) -> None:
        """Refuses a parameter that is a layer's own in one stage and in another one too, where there are replicas."""
        units = [unit_of(parameter) for parameter in self._tied.shared]
        own = any(unit is not None and not unit.is_root for unit in units)
        if any(self._processes.all_gather_object(own)) and self._replicas > 1:
            self._processes.refuse(
                f"a parameter that layers of several stages share must be outside the row of layers where there are "
                f"replicas, which have a layer's gradient in common (got one within, and {self._replicas} replicas); "
                "train it without replicas, or in one stage"
            )

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Computes the gradients of the mean loss of a batch, adds them to what is there, and returns the loss, fp32.

        ``inputs`` and ``targets`` have the samples of the batch in their first dimension, which divides by the number
        of micro-batches in all replicas together. Each process passes the whole batch, though only the first stage
        computes with the inputs and the last with the targets, and each replica with its part.

        The loss is the mean of the micro-batches' losses. Where labels are ignored (-100 in cross-entropy) that is not
        the batch's: a micro-batch with fewer labels weighs as much as others, and one without any makes all NaN. Pass a
        ``loss`` that divides a micro-batch's sum by its labels in the mean, which docs/tutorials/devices.md shows.

        Raises ParallelError, before anything is computed, where processes pass different batches, by a checksum of both
        (on a device once they are copied to the host), and where a stage returns another type under ``torch.autocast``.
        """
        self._check(inputs, targets, training=True)
        before = self._sent.total()
        with self._tied.summed(), self._clock.step():
            loss = self._run(self._own(inputs), self._own(targets), self._order.micro_batches, training=True)
        self._sent_bytes = self._sent.total() - before
        return loss

    def stage_times(self) -> tuple[StageTimes, ...]:
        """Returns how long each stage of this process computed and waited in the last batch, planned beside measured.

        ``stronghold.report`` has them, too. Blocks until the batch is computed.
        """
        return self._clock.last(self._sizes, self._numbers, self._planned, self._sent_bytes)

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss of a batch, fp32; as one micro-batch in each replica where it does not divide."""
        self._check(inputs, targets, training=False)
        if len(inputs) % (self._order.micro_batches * self._replicas) == 0:
            return self._run(self._own(inputs), self._own(targets), self._order.micro_batches, training=False)
        return self._run(inputs, targets, 1, training=False)

    @property
    def _replicas(self) -> int:
        return self._processes.world_size // self._processes.each

    def _own(self, batch: Tensor) -> Tensor:
        """Returns the samples of this process's replica."""
        return batch.chunk(self._replicas)[self._processes.replica]

    def named_modules(  # type: ignore[override]
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields this process's modules by their names in the whole model, and what holds them by its own name here."""
        for name, module in super().named_modules(memo, prefix, remove_duplicate):
            known = self._names.get(id(module))
            yield (name if known is None else f"{prefix}{prefix and '.'}{known}"), module

    def _renamed(self) -> dict[str, str]:
        """Returns, by the name of a parameter or buffer in the tree of this module, that in the whole model."""
        return {
            f"{own}.{name}": f"{whole}{whole and '.'}{name}"
            for (own, module), (whole, _) in zip(super().named_modules(), self.named_modules(), strict=True)
            for name in (*module._parameters, *module._buffers)
        }

    def _from_names(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        found = {own: state_dict[prefix + name] for own, name in self._renamed().items() if prefix + name in state_dict}
        for name in self._renamed().values():
            state_dict.pop(prefix + name, None)
        state_dict.update({prefix + own: value for own, value in found.items()})

    def take_sent_bytes(self) -> dict[int, int]:
        """Returns the bytes that this process has sent to each other one, by its rank, since it was last asked.

        They are activations and their gradients, counted as they are handed over; for a step
        :func:`stronghold.planner.link_bytes.boundary_bytes` has the formula.
        """
        sent, by_rank = self._sent.copy(), Counter[int]()
        self._sent.clear()
        for stage, count in sent.items():
            by_rank[self._processes.replica * self._processes.each + self._order.device_of(stage)] += count
        return dict(by_rank)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses: one process has not got the whole model."""
        raise ParallelError(
            "a model in stages is computed by all processes together; call forward_backward(inputs, targets) to train, "
            "and evaluate(inputs, targets) for a loss"
        )

    def _run(self, inputs: Tensor, targets: Tensor, micro_batches: int, *, training: bool) -> Tensor:
        from stronghold.distributed.schedules import without_outputs

        inputs = inputs.contiguous()  # what is received has the strides of the first batch
        schedule = self._schedule(inputs, micro_batches, training)
        first, last = 0 in self._numbers, self._order.stages - 1 in self._numbers
        losses: list[Tensor] = []
        with self._processes.watch.waiting(self._processes.stage_ranks):  # but for what each stage computes
            (schedule.step if training else schedule.eval)(
                *([inputs.to(self._device)] if first else []),
                target=targets.to(self._device) if last else None,
                losses=losses,
                **without_outputs(schedule),
            )
        loss = torch.stack(losses).detach().sum() if last else None
        return self._processes.mean(loss)

    def _check(self, inputs: Tensor, targets: Tensor, *, training: bool) -> None:
        if check_same_batch(self._processes, inputs, targets, training=training, changed=self._trained.changed()):
            self._shapes.train(self._trained.of_all(self._processes))
            self._schedules.clear()
        if len(targets) != len(inputs):
            self._processes.refuse(
                f"inputs and targets must have as many samples (got {len(inputs)} and {len(targets)}); pass the "
                "targets of the inputs"
            )
        parts = self._order.micro_batches * self._replicas if training else 1
        if not len(inputs) or len(inputs) % parts:
            each = f" in each of {self._replicas} replicas" if self._replicas > 1 else ""
            self._processes.refuse(
                f"the micro-batches must divide the batch (got a batch of {len(inputs)} samples and "
                f"{self._order.micro_batches} micro-batches{each}); pass batches of a multiple of {parts} samples, "
                "drop_last=True in a DataLoader"
            )

    def _schedule(self, inputs: Tensor, micro_batches: int, training: bool) -> Any:
        """Returns the library's schedule. It takes one shape only, so that another one needs another."""
        # Here, since the library's import takes a second that a model in one process does without.
        from stronghold.distributed.schedules import schedule_of
        from stronghold.distributed.stage import Stage

        if training:
            self._schedules.pop(False, None)  # with the memory into which its stages receive micro-batches
        key = (kind_of(inputs), micro_batches)
        known = self._schedules.get(training)
        if known is not None and known[0] == key:
            return known[1]
        engine, watch = engine_of(self), self._processes.watch
        assert engine is not None
        shapes = self._processes.run_on_all(lambda: self._shapes.between(inputs[: len(inputs) // micro_batches]))
        stages = [
            Stage(
                watch,
                self._clock,
                self._sent,
                engine.begin_pass,
                micro_batches,
                chunk,
                number,
                self._order.stages,
                self._device,
                training=training,
                input_args=shapes[number],
                output_args=shapes[number + 1],
                group=self._processes.stage_group,
            )
            for number, chunk in zip(self._numbers, self.chunks, strict=True)
        ]

        def loss(output: Tensor, targets: Tensor) -> Tensor:
            with watch.working(), self._clock.computing(self._order.stages - 1):
                return self._loss(self.chunks[-1], output, targets) / micro_batches

        schedule = schedule_of(self._order.schedule, stages, micro_batches, training=training, loss=loss)
        self._schedules[training] = (key, schedule)
        return schedule


def _to_names(module: StagedModule, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    for own, name in module._renamed().items():
        if prefix + own in state_dict:
            state_dict[prefix + name] = state_dict.pop(prefix + own)
