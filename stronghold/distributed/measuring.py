"""What each layer of a row takes: seconds and bytes of one micro-batch, found by computing it."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stronghold.device import drawn_apart
from stronghold.distributed.layered_model import LayeredModel
from stronghold.errors import ParallelError
from stronghold.planner.machine_file import Spread
from stronghold.planner.stage_costs import LayerCost, spread_of

ROUNDS, MOST_ROUNDS = 7, 21
"""Each layer is measured so often, in rounds over all layers, behind a pass that does not count."""
QUIET = 0.1
"""More than ``ROUNDS`` are taken while measurements of the whole row differ by more than this part of it."""

T = TypeVar("T")


def measure(
    layered: LayeredModel,
    inputs: Tensor,
    targets: Tensor | None = None,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[LayerCost]:
    """Computes each layer of ``layered`` by itself, forward and backward, and returns what it takes.

    ``inputs`` is one micro-batch of any shape and dtype, and each layer gets what the one before it returns. What comes
    before the first layer counts as a part of it, and what follows the last one likewise; the loss with it, where there
    are ``targets``. ``dtype`` is the type that the parameters compute in, by default their own. ``progress`` is called
    with how much is measured, and of how much. ``clock`` gives seconds, for a device that computes on the host.

    - ``forward_s`` and ``backward_s`` are medians over passes of a layer that is on the device, with nothing to wait
      for, and ``forward_measured_s`` and ``backward_measured_s`` have their quartiles; no layer is recomputed. The
      passes are in rounds over all layers, so that what else the machine does meanwhile is shared by all of them; where
      they differ much there are more rounds.
    - ``weight_bytes`` are the parameters in the type that they compute in, and the buffers; no gradients, masters or
      moments. A parameter that several layers share counts in each of them, since each of their stages has a copy.
    - ``activation_bytes`` is all memory that autograd keeps from the forward to the backward pass, whole allocations,
      each once, but for parameters and buffers. A layer's input is among it where the backward pass needs it.
    - ``input_bytes`` is the layer's input.

    A layer is copied to the device, one at a time, and the copy thrown away: the model may be larger than memory, or on
    the meta device, in which case its values are drawn. Nothing of the model changes, and neither do random states.
    Layers of the same structure are computed once. Raises ParallelError for a layer that cannot compute what it gets.
    """
    kinds: dict[Hashable, _Kind] = {}
    row: list[_Kind] = []
    x = inputs.detach().to(device)
    targets = None if targets is None else targets.to(device)
    count = ROUNDS * len(layered.layers)
    with drawn_apart(device), torch.enable_grad():
        for number in range(len(layered.layers)):
            stage = layered.stage(number, number + 1)
            scored = targets is not None and number + 1 == len(layered.layers)
            key = (structure_of(stage), x.shape, x.stride(), x.dtype, x.requires_grad, scored)
            if key not in kinds:
                try:
                    build = partial(_Layer, layered, stage, x, targets if scored else None, device, dtype, clock)
                    kinds[key] = _Kind(build)
                except Exception as error:
                    raise ParallelError(
                        f"each layer must compute what the one before it returns (layer {number} got "
                        f"{tuple(x.shape)} of {x.dtype}, and: {error}); pass inputs, and a dtype, like those that will "
                        "come, or a smaller micro-batch where memory is short"
                    ) from error
            row.append(kinds[key])
            x = kinds[key].output
            if progress is not None:
                progress(number + 1, count)
        for done in range(1, MOST_ROUNDS):
            if done >= ROUNDS:
                if spread_of(_costs_of(row)) <= QUIET:
                    break
                count += len(row)
            for number, kind in enumerate(kinds.values(), 1):
                kind.measure_again()
                if progress is not None:
                    progress((done * len(kinds) + number) * len(row) // len(kinds), count)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what copies took is free when the device is asked
    return _costs_of(row)


class _Kind:
    """Layers that compute alike: what one of them takes, measured round by round on a copy that ``build`` makes."""

    def __init__(self, build: Callable[[], _Layer]) -> None:
        self._build = build
        layer = build()
        self._activation_bytes, output = layer.kept()
        self.output = output.detach().requires_grad_(output.requires_grad)
        self._weight_bytes, self._input_bytes = layer.weight_bytes(), layer.input_bytes()
        self._passes = [layer.passes()]

    def measure_again(self) -> None:
        layer = self._build()
        layer.passes()  # the first one of a copy allocates, and finds nothing of it in a cache
        self._passes.append(layer.passes())

    def cost(self) -> LayerCost:
        forward_s, backward_s = (Spread.of(seconds) for seconds in zip(*self._passes, strict=True))
        return LayerCost(
            forward_s=forward_s.likely,
            backward_s=backward_s.likely,
            weight_bytes=self._weight_bytes,
            activation_bytes=self._activation_bytes,
            input_bytes=self._input_bytes,
            forward_measured_s=forward_s,
            backward_measured_s=backward_s,
        )


def _costs_of(row: Sequence[_Kind]) -> list[LayerCost]:
    costs = {id(kind): kind.cost() for kind in row}
    return [costs[id(kind)] for kind in row]


class _Layer:
    """A copy of one layer on the device, and what it computes: a micro-batch, with its loss where it has targets."""

    def __init__(
        self,
        layered: LayeredModel,
        stage: nn.Module,
        x: Tensor,
        targets: Tensor | None,
        device: torch.device,
        dtype: torch.dtype | None,
        clock: Callable[[], float],
    ) -> None:
        self._layered, self._x, self._targets, self._device, self._clock = layered, x, targets, device, clock
        self._stage = _copied(stage, device, dtype)

    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._weights())

    def input_bytes(self) -> int:
        return self._x.nbytes

    def kept(self) -> tuple[int, Tensor]:
        """Returns the bytes that autograd keeps between the passes, and the output. It warms up, too."""
        storages: dict[int, torch.UntypedStorage] = {}  # held, so that no other one comes to lie at its address

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage
            return tensor

        given = self._given()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = self._forward(given)
        for weight in self._weights():
            storages.pop(weight.untyped_storage().data_ptr(), None)
        kept_bytes = sum(storage.nbytes() for storage in storages.values())
        if output.requires_grad:
            torch.autograd.backward(output, torch.ones_like(output))
        return kept_bytes, output

    def passes(self) -> tuple[float, float]:
        """Returns the seconds of one pass forward and one backward."""
        given = self._given()
        output, forward_s = self._timed(lambda: self._forward(given))
        if not output.requires_grad:  # of first layers that are frozen
            return forward_s, 0.0
        gradient = torch.ones_like(output)
        _, backward_s = self._timed(lambda: torch.autograd.backward(output, gradient))
        return forward_s, backward_s

    def _given(self) -> Tensor:
        """Returns the input anew, as one that a layer computed: a layer may write into it."""
        return self._x.detach().requires_grad_(self._x.requires_grad).clone()

    def _forward(self, given: Tensor) -> Tensor:
        for parameter in self._stage.parameters():
            parameter.grad = None
        output = self._stage(given)
        if not isinstance(output, Tensor):
            raise TypeError(f"it returned {type(output).__name__}, not one tensor")
        return output if self._targets is None else self._layered.loss(self._stage, output, self._targets)

    def _timed(self, action: Callable[[], T]) -> tuple[T, float]:
        """Returns what ``action`` returns, and the seconds until the device is done with it."""
        if self._device.type != "cuda":
            begin_s = self._clock()
            return action(), self._clock() - begin_s
        with torch.cuda.device(self._device):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            result = action()
            end.record()
            end.synchronize()
            return result, begin.elapsed_time(end) / 1000

    def _weights(self) -> list[Tensor]:
        return [*self._stage.parameters(), *self._stage.buffers()]


def _copied(stage: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """Returns a copy of ``stage`` on the device, its parameters in ``dtype``."""
    memo: dict[int, Any] = {}
    for parameter in stage.parameters():
        wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        memo[id(parameter)] = nn.Parameter(
            _values(parameter.detach(), device, wanted), requires_grad=parameter.requires_grad
        )
    for buffer in stage.buffers():
        memo[id(buffer)] = _values(buffer.detach(), device, buffer.dtype)
    return copy.deepcopy(stage, memo)


def _values(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if not tensor.is_meta:
        return tensor.to(device, dtype, copy=True)
    drawn = torch.empty_like(tensor, device=device, dtype=dtype)
    if not drawn.is_floating_point():
        return drawn.zero_()
    return drawn.normal_(std=max(1, math.prod(tensor.shape[1:])) ** -0.5)  # outputs are about as large as inputs


def structure_of(stage: nn.Module) -> Hashable:
    """Returns what is equal for layers that compute alike, whatever their parameters' values.

    That is every module's type and attributes, by their values where those are comparable, and the tensors' kinds.
    """
    modules = tuple(
        (
            name,
            type(module),
            tuple((key, _comparable(value)) for key, value in vars(module).items() if key not in _TREE),
        )
        for name, module in stage.named_modules()
    )
    tensors = chain(stage.named_parameters(remove_duplicate=False), stage.named_buffers(remove_duplicate=False))
    return modules, tuple((name, t.shape, t.stride(), t.dtype, t.requires_grad, t.is_meta) for name, t in tensors)


_TREE = ("_modules", "_parameters", "_buffers")


def _comparable(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return repr(value)  # of lists and dictionaries; what has no value to show shows its address
    return type(value), value
