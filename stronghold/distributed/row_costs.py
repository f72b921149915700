"""What each layer of a row computes and takes as a part of a stage, found on tensors without memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from stronghold.distributed.layered_model import LayeredModel, shared_by_ends
from stronghold.distributed.measuring import structure_of
from stronghold.engine.planning.model_memory import ModelMemory
from stronghold.formats.kept_in_fp32 import mark_kept_in_fp32
from stronghold.planner.choices import Choice
from stronghold.planner.machine_file import MachineFile
from stronghold.planner.machine_rates import Pace, op_rates
from stronghold.planner.model_bytes import ModelBytes
from stronghold.planner.op_costs import Op, OpRates

if TYPE_CHECKING:
    from stronghold.engine.planning.layer_traces import LayerTraces


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """One layer in a stage of its own, with what is before or behind the row there, over one micro-batch.

    ``forward`` and ``backward`` are what it computes without recomputation, ``saved_bytes`` what is kept of it between
    the passes where its activations are, ``input_bytes`` what enters it, ``working_bytes`` what its passes take beside
    that and a layer's activations at the most, by whether activations are kept.
    """

    forward: Counter[Op]
    backward: Counter[Op]
    input_bytes: int
    saved_bytes: int
    working_bytes: dict[bool, int]


class _LayerKind(NamedTuple):
    """Layers that are alike: the first of them."""

    number: int
    of: ModelMemory
    memory: ModelBytes


class RowCosts:
    """Answers for a row of layers, in memory or on the meta device, what each layer takes in a stage.

    ``inputs`` are a step's, of all replicas, and ``targets`` what the loss is of, if it is of any: tensors whose first
    dimension is the batch, of which sizes count. Raises ValueError for layers that cannot be offloaded or computed.
    """

    def __init__(
        self,
        layered: LayeredModel,
        machine: MachineFile,
        inputs: Tensor,
        targets: Tensor | None,
        *,
        dtype: torch.dtype | None,
    ) -> None:
        self._layered, self._machine, self._dtype = layered, machine, dtype
        self._inputs, self._targets = inputs, targets
        mark_kept_in_fp32(layered.model)  # by its own list, which a part has not
        self._kinds: dict[Hashable, _LayerKind] = {}
        self.kinds = [self._kind_of(number) for number in range(len(layered.layers))]
        self._traces: dict[Hashable, LayerTraces] = {}
        self._rows: dict[int, list[LayerRow]] = {}
        self._rates: dict[tuple[Pace, int], OpRates] = {}

    @cached_property
    def memory(self) -> list[ModelBytes]:
        """The bytes of each layer, a model of one, with the root that its stage has for it."""
        return [kind.memory for kind in self.kinds]

    @cached_property
    def memory_on_disk(self) -> list[ModelBytes]:
        """The same where the store is on disk."""
        found = {id(kind): self._bytes_of(kind.of, "disk") for kind in self._kinds.values()}
        return [found[id(kind)] for kind in self.kinds]

    @cached_property
    def _shared(self) -> dict[int, nn.Parameter]:
        return {id(parameter): parameter for parameter in shared_by_ends(self._layered)}

    @cached_property
    def shared_bytes(self) -> int:
        """The gradients of what the first stage has and the last one, too, in fp32 as they are added up."""
        return sum(4 * p.numel() for p in self._shared.values() if p.requires_grad)

    def of(self, samples: int) -> list[LayerRow]:
        """Returns what each layer does over a micro-batch of so many samples."""
        if samples not in self._rows:
            self._rows[samples] = self._run(samples)
        return self._rows[samples]

    def seconds(self, ops: Counter[Op], pace: Pace, processes: int) -> float:
        """Returns what they take on the device, the host's launches with it where that is behind.

        So many ``processes`` do the same at the same time; where the host computes they have its cores in common.
        """
        if (pace, processes) not in self._rates:
            self._rates[pace, processes] = op_rates(self._machine, pace, processes)
        launches_s = sum(ops.values()) * self._machine.launch_s.likely if self._machine.runs_behind else 0.0
        return max(self._rates[pace, processes].seconds(ops), launches_s)

    def _kind_of(self, number: int) -> _LayerKind:
        last = len(self._layered.layers) - 1
        layer = self._layered.layers[number]
        key = (number == 0, number == last, structure_of(layer))
        if key not in self._kinds:
            of = self._memory_of(number)
            self._kinds[key] = _LayerKind(number, of, self._bytes_of(of, "ram"))
        return self._kinds[key]

    def _bytes_of(self, of: ModelMemory, store: str) -> ModelBytes:
        found = of.of(Choice(window=1, store=store))
        root = [
            replace(one, is_shared=id(unit.parameters[0]) in self._shared)
            for one, (unit, _) in zip(found.root, of.units.root, strict=True)
        ]
        return replace(found, root=root)

    def _memory_of(self, number: int) -> ModelMemory:
        alone = nn.Sequential(self._layered.stage(number, number + 1))
        container = f"0{self._layered.container and '.'}{self._layered.container}"
        return ModelMemory(alone, layers=[container], dtype=self._dtype, is_host=self._machine.is_host)

    def _traces_of(self, number: int) -> LayerTraces:
        """Shared by layers that are alike: the first, the last and one between them run the same layer once."""
        from stronghold.engine.planning.layer_traces import LayerTraces

        return self._traces.setdefault(structure_of(self._layered.layers[number]), LayerTraces())

    def _run(self, samples: int) -> list[LayerRow]:
        known: dict[tuple[int, torch.Size, torch.dtype], tuple[LayerRow, Tensor]] = {}
        rows, x = [], _part(self._inputs, samples)
        for kind in self.kinds:
            key = kind.number, x.shape, x.dtype
            if key not in known:
                known[key] = self._run_alone(kind.number, x)
            row, x = known[key]
            rows.append(row)
        return rows

    def _run_alone(self, number: int, x: Tensor) -> tuple[LayerRow, Tensor]:
        # Here, since what it imports takes seconds that training does without.
        from stronghold.engine.planning.computation import ModelComputation

        last = number == len(self.kinds) - 1
        targets = None if self._targets is None or not last else _part(self._targets, len(x))
        alone = _Alone(self._layered, number, is_last=last)
        modules, inputs = self.kinds[number].of.units.modules, (x, targets) if targets is not None else (x,)
        of = ModelComputation(alone, modules, inputs, dtype=self._dtype, traces=self._traces_of(number))
        run, root = of.layer(0), of.root
        assert alone.output is not None
        # What is computed outside the layer is not recomputed: all that it takes forward counts as kept.
        behind = max(0, root.behind_bytes - x.nbytes) if last and targets is not None else 0
        saved, working = x.nbytes + of.passes(0, None, kept=True).saved_bytes + behind, {}
        root_gradients = sum(unit.root_gradient for unit in self.kinds[number].memory.root)
        for kept in (False, True):
            own = of.passes(0, None, kept=kept)
            left = own.saved_bytes if 0 in root.dropped else own.left_bytes
            forward = max(root.before_bytes[0], root.given_bytes[0] + own.forward_bytes, left + root.behind_bytes)
            within = root.live_bytes.get(0, 0) + own.saved_bytes + own.backward_bytes
            most = max(forward, within, root.after_bytes.get(0, 0))
            working[kept] = max(0, most - root_gradients - saved - (0 if kept else x.nbytes))
        computed, backward = root.before + run.forward + root.behind, Counter[Op]()
        for ops in (root.behind_backward, run.backward, root.before_backward):
            backward += ops
        row = LayerRow(
            forward=computed, backward=backward, input_bytes=x.nbytes, saved_bytes=saved, working_bytes=working
        )
        return row, alone.output


class _Alone(nn.Module):
    """One layer in a stage of its own, whose output is made a loss of."""

    def __init__(self, layered: LayeredModel, number: int, *, is_last: bool) -> None:
        super().__init__()
        self._loss, self._is_last = layered.loss, is_last
        self.stage = layered.stage(number, number + 1)
        self.output: Tensor | None = None
        """On the meta device."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if x.is_floating_point():
            x = x.detach().requires_grad_()  # it is the output of another layer
        output = self.stage(x)
        self.output = torch.empty(output.shape, dtype=output.dtype, device="meta")
        if self._is_last:
            return self._loss(self.stage, output, x if targets is None else targets)
        return output.sum()


def _part(tensor: Tensor, samples: int) -> Tensor:
    return torch.empty((samples, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
