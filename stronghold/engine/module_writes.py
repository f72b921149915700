"""What a layer writes into its own modules while it runs once for each micro-batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from stronghold.engine.joining import NotCutError

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_buffers"}
_CONTAINERS = (list, tuple, deque, dict)
_LOOKED_AT = (Tensor, *_CONTAINERS)


class ModuleWrites:
    """What the modules of a layer hold before it runs for its micro-batches, for ``check`` to compare afterwards.

    What a module holds is that of the last micro-batch, or an entry for each: of an auxiliary loss, a part. Values
    without a graph, such as rotary tables and recorded weights, add nothing to a loss and are left alone.
    """

    def __init__(self, module: nn.Module, layer: str) -> None:
        self._module, self._layer = module, layer
        self._buffers = [(name, b, b._version) for name, b in module.named_buffers() if not b.is_inference()]
        self._graphs = {id(tensor): (tensor, tensor._version) for _, _, tensor in _graphs_in(module)}

    def check(self) -> None:
        """Raises NotCutError where the layer has written a buffer, or a value with a graph into an attribute."""
        if written := [name for name, buffer, version in self._buffers if buffer._version != version]:
            raise NotCutError(
                f"micro_batch must not change what a layer computes (got {self._layer}, which writes its buffer "
                f"{written[0]} in each run, and runs once for each micro-batch); offload without micro_batch"
            )
        for module, name, tensor in _graphs_in(self._module):
            before, version = self._graphs.get(id(tensor), (None, 0))
            if before is not tensor or tensor._version != version:
                raise NotCutError(
                    f"micro_batch must be able to put what a layer computes together (got {self._layer}, which writes "
                    f"a tensor of shape {tuple(tensor.shape)} with a graph into the attribute {name} of its "
                    f"{type(module).__name__}, once for each micro-batch); return it, or offload without micro_batch"
                )


def _graphs_in(layer: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yields the tensors that require gradients and are no parameters, with the attribute and its module."""
    for module in layer.modules():
        for name, value in vars(module).items():
            if name in _OF_EVERY_MODULE or not isinstance(value, _LOOKED_AT) or _is_weight(module, name):
                continue
            for tensor in _graphs_within(value, set()):
                yield module, name, tensor


def _is_weight(module: nn.Module, name: str) -> bool:
    """Whether torch.nn.utils computes an attribute of parameters before each run: weight_norm, spectral_norm, prune."""
    return f"{name}_orig" in module._parameters or f"{name}_v" in module._parameters


def _graphs_within(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.requires_grad and not isinstance(value, nn.Parameter):
            yield value
    elif isinstance(value, _CONTAINERS) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, dict) else value:
            yield from _graphs_within(item, seen)
