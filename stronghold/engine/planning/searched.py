"""Searches for the best plan of a model, and says it in the words of ``offload`` and ``AdamW``."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from stronghold.engine.joining import NotCutError
from stronghold.engine.planning.kept_inputs import OFF_DEVICE, InputsOfLayers
from stronghold.engine.planning.memory_limits import Limits
from stronghold.engine.planning.model_memory import ModelMemory
from stronghold.engine.planning.model_planner import ModelPlanner
from stronghold.engine.split_experts import fewest_experts
from stronghold.errors import BudgetError
from stronghold.planner.choices import Choice, Space
from stronghold.planner.machine_file import MachineFile, Spread
from stronghold.planner.machine_rates import Pace
from stronghold.planner.other_plans import Alternative, Refused
from stronghold.planner.search import Found, Plan, Refusal, search
from stronghold.planner.step import step_time
from stronghold.planner.step_bytes import MUON
from stronghold.planner.training_plan import TrainingPlan
from stronghold.unit import all_parameters, count_of
from stronghold.units import format_unequal

BLOCK_BYTES = 512
"""What PyTorch's allocators for accelerators round a tensor's memory up to."""


class PlannedModel:
    """A model, on the meta device or not, with the inputs of a step and the machine that it is planned for.

    ``directories`` are real paths that the machine was probed with, ``sequence`` the tokens of a sample. Of so many
    ``replicas`` on the machine it is one, and the ``inputs`` are its part of a step's. Layers that are recomputed have
    their inputs where ``activations`` says, ``"host"`` or ``"disk"`` as for ``offload``, else on the device. With
    ``by_muon`` it is for ``stronghold.Muon``, and all choices must be of its momentum. A step adds up the gradients of
    so many batches like the inputs, ``accumulate``, or of any number of them where that is None. Raises ValueError for
    a model that cannot be planned for.
    """

    def __init__(
        self,
        model: nn.Module,
        machine: MachineFile,
        inputs: Tensor | Mapping[str, Any] | Sequence[Any],
        *,
        layers: str | Sequence[str] | None,
        dtype: torch.dtype | None,
        directories: Sequence[str],
        loss: Callable[[Any], Tensor] | None = None,
        sequence: int | None = None,
        name: str | None = None,
        replicas: int = 1,
        activations: int | str = "recompute",
        by_muon: bool = False,
        accumulate: int | None = 1,
    ) -> None:
        # Here, since what it imports takes seconds that training does without.
        from stronghold.engine.planning.computation import ModelComputation
        from stronghold.engine.planning.quantised_layers import with_rates

        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                f"a plan is of training, and something must be trained (got {type(model).__name__}, all frozen); add "
                "adapters first, or let parameters require gradients"
            )
        inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
        self.input_shapes = [
            tuple(t.shape) for t in tree_flatten([inputs])[0] if isinstance(t, Tensor) and t.ndim and t.shape[0] > 1
        ]
        """Of the inputs, but for those that are the same for all samples."""
        self._model, self._directories = model, directories
        self._recompute = activations if isinstance(activations, str) and activations in OFF_DEVICE else "recompute"
        self._accumulate = accumulate
        self._sequence, self._name = sequence, name or type(model).__name__
        is_host, block_bytes = machine.is_host, 1 if machine.is_host else BLOCK_BYTES
        memory_of = partial(
            ModelMemory,
            model,
            layers=layers,
            dtype=dtype,
            is_host=is_host,
            replicas=replicas,
            block_bytes=block_bytes,
            accumulates=(accumulate or 1) > 1,
        )
        self.memory, self._memory_of = memory_of(by_muon=by_muon), memory_of
        modules = self.memory.units.modules
        self.computation = ModelComputation(
            model, modules, inputs, dtype=dtype, loss=loss, block_bytes=block_bytes, fused=not is_host
        )
        computes = dtype or next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self._machine, self._assumed = with_rates(machine, self.computation.quantised, computes)

    def assume(self, text: str) -> None:
        """Has plans say that they assume what ``text`` says."""
        self._assumed.append(text)

    @property
    def may_keep(self) -> bool:
        """Whether layers in the window may keep their activations: not where weights are saved as dequantised."""
        return all(one.may_be_kept for one in self.computation.quantised)

    def for_muon(self) -> PlannedModel:
        """Returns the same model with ``stronghold.Muon`` as its optimizer."""
        other = copy.copy(self)
        other.memory = self._memory_of(by_muon=True)
        return other

    def best(self, space: Space, limits: Limits, *, tokens: int = 10**9, rival_s: float = math.inf) -> TrainingPlan:
        """Returns the plan of the shortest step, ``rival_s`` as for ``search``. Raises BudgetError where nothing fits.

        Where device and host are one memory, a layer in RAM is computed with where it is: all are resident, for slots
        would be a second copy. Replicas, which have layers in RAM in common, each keep a copy of what is resident.
        Where layers cannot run over micro-batches, and need not, they run over the whole batch; where they must, that
        raises NotCutError.
        """
        try:
            return self._best(space, limits, tokens, rival_s)
        except NotCutError:
            if None not in space.micro_batches:
                raise
        return self._best(replace(space, micro_batches=(None,)), limits, tokens, rival_s)

    def _best(self, space: Space, limits: Limits, tokens: int, rival_s: float) -> TrainingPlan:
        planner = ModelPlanner(
            self.memory,
            self.computation,
            self._machine,
            limits,
            self._directories,
            activations=self._recompute,
            accumulate=self._accumulate,
        )
        spaces = [space]
        alone = self.memory.replicas == 1
        if self._machine.is_host and alone and "disk" not in space.stores and space.layers in space.residents:
            spaces.insert(0, replace(space, residents=(space.layers,)))
        for one in spaces:
            found = search(
                one,
                planner.work_of,
                planner.bytes.of,
                planner.bytes.limits,
                rival_s=rival_s,
                least_s_of=planner.computing_s,
            )
            if found.plans:
                return self._told(planner, found, limits, tokens)
        raise _nothing_fits(found.refused, has_experts=fewest_experts(self._model) > 1, on_disk="disk" in space.stores)

    def inputs_host_bytes(self, micro_batch: int | None) -> int:
        """Returns what of the host's memory the layers' inputs take that are not kept on the device."""
        return InputsOfLayers(self.computation, self._recompute).taken(micro_batch).host

    def _told(self, planner: ModelPlanner, found: Found, limits: Limits, tokens: int) -> TrainingPlan:
        told = _Told(planner, self._directories, self.memory, self._recompute)
        best = found.plans[0]
        _, taken, activation_bytes = planner.bytes.placed(best.choice)
        slow_s, fast_s = (told.step_s(best.choice, pace) for pace in ("slow", "fast"))
        parameters = list(self._model.parameters())
        samples = self.computation.batch * self.memory.replicas * planner.bytes.passes(best.choice)
        return TrainingPlan(
            model=self._name,
            parameters=sum(count_of(p) for _, p in all_parameters(self._model)),
            trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
            layers=len(self.memory.units.layers),
            samples=samples,
            tokens=samples * (self._sequence or 1),
            dtype=planner.dtype,
            machine=self._machine.device_name,
            device=self._machine.device,
            is_host=self._machine.is_host,
            settings=told.settings(best.choice),
            optimizer=told.optimizer(best.choice),
            step_s=Spread(
                low=min(fast_s, best.step.step_s), likely=best.step.step_s, high=max(slow_s, best.step.step_s)
            ),
            longest=best.step.longest,
            busy_s=best.step.busy_s,
            waits_s=best.step.waits_s,
            slots_bytes=taken.slots,
            gradient_bytes=taken.gradients,
            root_bytes=taken.root,
            resident_bytes=taken.resident,
            root_gradient_bytes=taken.root_gradients,
            activation_bytes=activation_bytes,
            pinned_bytes=taken.pinned,
            pageable_bytes=taken.pageable,
            process_bytes=limits.process,
            disk_bytes=taken.disk,
            written_bytes=planner.bytes.written_bytes(best.choice),
            asked_tokens=tokens,
            others=[told.alternative(other) for other in found.plans[1:]],
            refused=[told.refused(one) for one in found.refused],
            spans=planner.spans_of(best.step),
            updated_by="AdamW" if best.choice.states != MUON else "Muon",
            update_bytes=planner.bytes.update_bytes(best.choice),
            assumed=[*self._assumed, *planner.assumed(best.choice)],
            further_s=told.further_s(best),
        )


class _Told:
    """Says choices in the words of ``offload`` and ``AdamW``."""

    def __init__(self, planner: ModelPlanner, directories: Sequence[str], memory: ModelMemory, recompute: str) -> None:
        self._planner, self._directories, self._memory = planner, list(directories), memory
        self._recompute = recompute

    def settings(self, choice: Choice) -> dict[str, Any]:
        layers = len(self._memory.units.layers)
        placed, _, _ = self._planner.bytes.placed(choice)
        device, host = self._planner.bytes.budgets(choice)
        found: dict[str, Any] = {"window": choice.window, "resident": choice.resident}
        found["activations"] = {0: self._recompute, layers: "keep"}.get(choice.kept, choice.kept)
        if choice.micro_batch is not None:
            found["micro_batch"] = choice.micro_batch
        if choice.store != "ram":
            found["store"] = self._directories
            if host is not None:
                found |= {"host_memory": host, **self._planner.bytes.hints(choice)}
        if (passes := self._planner.bytes.passes(choice)) > 1:
            found["accumulate"] = passes
        if device is not None:
            found["device_memory"] = self._memory.device_memory(choice, placed)
        return found

    def optimizer(self, choice: Choice) -> dict[str, Any]:
        states = {} if choice.states == MUON else {"states": choice.states}
        return {**states, "update": choice.update}

    def step_s(self, choice: Choice, pace: Pace) -> float:
        work = self._planner.work_of(choice, pace)
        return step_time(work.layers, work.machine, work.settings, work.root).step_s

    def further_s(self, plan: Plan) -> dict[str, float]:
        """Returns what one more batch takes whose gradients are added up, ``"step"`` and waits; nothing where none is.

        Layers that are updated in the backward pass add up none.
        """
        work = self._planner.work_of(plan.choice)
        if work.settings.in_backward:
            return {}
        longer = step_time(
            work.layers, work.machine, replace(work.settings, passes=work.settings.passes + 1), work.root
        )
        waits_s = {cause: max(0.0, longer.waits_s[cause] - less_s) for cause, less_s in plan.step.waits_s.items()}
        return {"step": longer.step_s - plan.step.step_s, **waits_s}

    def alternative(self, plan: Plan) -> Alternative:
        taken = self._planner.bytes.of(plan.choice)
        return Alternative(
            settings=self.settings(plan.choice),
            optimizer=self.optimizer(plan.choice),
            step_s=plan.step.step_s,
            device_bytes=taken.get("device", 0),
            host_bytes=taken.get("host", taken.get("memory", 0)),
        )

    def refused(self, one: Refusal) -> Refused:
        return Refused(
            settings=self.settings(one.choice),
            optimizer=self.optimizer(one.choice),
            place=one.place,
            needed_bytes=one.needed_bytes,
            limit_bytes=one.limit_bytes,
        )


def _nothing_fits(refused: Sequence[Refusal], *, has_experts: bool, on_disk: bool) -> BudgetError:
    """Says what lacks least: in one place or another, or in several at once."""
    least: dict[str, Refusal] = {}
    for one in refused:
        if one.place not in least or one.needed_bytes < least[one.place].needed_bytes:
            least[one.place] = one
    found = []
    for place, one in least.items():
        memory = place if place == "memory" else f"{place} memory"
        needed, limit = format_unequal(one.needed_bytes, one.limit_bytes)
        settings = ", ".join(f"{name}={value!r}" for name, value in one.choice._asdict().items() if name != "kept")
        found.append(f"{memory} must hold at least {needed} (got {limit}), with {settings}")
    apart = "cut a layer's experts apart (experts_per_part='auto'), " if has_experts else ""
    disk = "" if on_disk else "give a directory on a disk (store=), "
    eight = "allow states='8bit', " if all(one.choice.states == "fp32" for one in refused) else ""
    both = "and" if any(len(one.lacking) > 1 for one in least.values()) else "or"
    lacking = f"; {both} ".join(found)
    return BudgetError(
        f"nothing fits: {lacking}; raise the budget, {eight}{disk}{apart}or make the batch smaller",
        {place: one.needed_bytes for place, one in least.items()},
        lacking,
    )
