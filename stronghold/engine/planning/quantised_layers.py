"""Linear layers with quantised weights on tensors without values, and how fast a machine dequantises them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stronghold.planner.machine_file import MachineFile, Spread
from stronghold.probing import facts_of
from stronghold.probing.this_machine import device_given
from stronghold.unit import all_parameters, part_of, stand_in

ROUNDS = 3
"""Times that one weight is dequantised to learn how long that takes."""


@torch.library.custom_op(
    "stronghold::dequantise",
    mutates_args=(),
    schema="(Tensor beside, int packed_bytes, int[] shape, ScalarType dtype, str title) -> Tensor",
)
def dequantise(beside: Tensor, packed_bytes: int, shape: list[int], dtype: torch.dtype, title: str) -> Tensor:
    """Stands for what a library makes of ``packed_bytes``: a weight of ``shape`` in ``dtype``, without its values."""
    return beside.new_empty(shape, dtype=dtype)


dequantise.register_fake(dequantise._init_fn)


@dataclass(frozen=True)
class QuantisedLayer:
    """One linear layer, whose weight is of ``packed_bytes`` with its scales. ``title`` is what its values are in.

    Its product dequantises the weight in the forward pass, and again in the backward pass if that ``may_be_kept``
    which the pass saves: the weight as it is packed; else it saves what it has dequantised.
    """

    module: nn.Linear
    packed_bytes: int
    title: str
    may_be_kept: bool

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """Computes as the layer does, on tensors without values."""
        dtype = getattr(self.module, "compute_dtype", None) or x.dtype
        output: Tensor = _Product.apply(x.to(dtype), self, dtype)
        bias = self.module.bias
        return (output if bias is None else output + bias.to(dtype)).to(x.dtype)

    def dequantised(self, beside: Tensor, dtype: torch.dtype) -> Tensor:
        shape = [self.module.out_features, self.module.in_features]
        found: Tensor = dequantise(beside, self.packed_bytes, shape, dtype, self.title)
        return found

    def bytes_per_s(self, device: torch.device, dtype: torch.dtype) -> Spread:
        """Returns how fast its weight is dequantised there, by the bytes that are read and written."""
        weight: Any = self.module.weight
        sizes = weight.shape if weight.dtype != torch.uint8 else weight.quant_state.shape
        moved = self.packed_bytes + sizes.numel() * dtype.itemsize
        times_s = []
        for _ in range(ROUNDS + 1):
            _wait(device)
            begin_s = time.perf_counter()
            self._once(weight, device, dtype)
            _wait(device)
            times_s.append(time.perf_counter() - begin_s)
        likely = moved / statistics.median(times_s[1:])
        return Spread(moved / max(times_s[1:]), likely, moved / min(times_s[1:]))

    def _once(self, weight: Any, device: torch.device, dtype: torch.dtype) -> None:
        there = weight.detach().to(device)
        if hasattr(weight, "quant_state"):
            from bitsandbytes.functional import dequantize_4bit

            dequantize_4bit(weight.data.to(device), weight.quant_state)
        elif weight.dtype == torch.int8:
            scales = torch.ones(len(there), 1, dtype=dtype, device=device)
            there.as_subclass(Tensor).to(dtype).mul_(scales)
        else:  # with one row, whose product is nothing beside it
            functional.linear(torch.ones(1, there.shape[-1], dtype=dtype, device=device), there)


def quantised_layers(model: nn.Module) -> list[QuantisedLayer]:
    """Returns the linear layers of ``model`` whose weights are quantised.

    Raises ValueError for other modules with such weights, which compute with the values that they look up.
    """
    found = []
    for prefix, module in model.named_modules():
        parts = [
            (part, parameter.nbytes)
            for name, parameter in all_parameters(module)
            if (part := part_of(parameter)) is not None and name.startswith("weight")
        ]
        if not parts or "weight" not in module._parameters:
            continue
        part = parts[0][0]
        if not isinstance(module, nn.Linear):
            raise ValueError(
                "a plan computes the products of linear layers with quantised weights, and no others (got "
                f"{prefix}.weight, of weights {part.title}, of a {type(module).__name__}); offload it by window=, "
                "activations= and micro_batch= without inputs= or plan=, and read what it takes from stronghold.report"
            )
        found.append(QuantisedLayer(module, sum(size for _, size in parts), part.title, part.may_be_kept))
    return found


@contextmanager
def without_values(layers: Sequence[QuantisedLayer]) -> Iterator[None]:
    """Has the layers compute on tensors without values inside of the block."""
    own = [one.module.__dict__.get("forward") for one in layers]
    try:
        for one in layers:
            one.module.forward = partial(one.forward)  # type: ignore[method-assign]
        yield
    finally:
        for one, forward in zip(layers, own, strict=True):
            if forward is None:
                one.module.__dict__.pop("forward", None)
            else:
                one.module.forward = forward  # type: ignore[method-assign]


def with_rates(
    machine: MachineFile, layers: Sequence[QuantisedLayer], dtype: torch.dtype
) -> tuple[MachineFile, list[str]]:
    """Returns the machine with the rates at which it dequantises, and what a plan rests on, in words.

    They are measured, of one weight of each kind, where the machine is this one and the weights have values.
    """
    rates: dict[str, Spread] = {}
    assumed: list[str] = []
    device = device_given(machine.device)  # of a file, which may have any text there
    here = _is_here(machine, device)
    for title, one in {one.title: one for one in layers}.items():
        assumed.append(f"a product with weights {title} takes that in {_name(dtype)}, behind its dequantised weight's")
        if here and not stand_in(one.module.weight).is_meta:
            rates[f"{_name(dtype)} {title}"] = one.bytes_per_s(device, dtype)
        else:
            assumed.append(f"weights {title} are dequantised as fast as functions such as GELU are computed")
    return (replace(machine, transcendental={**machine.transcendental, **rates}) if rates else machine), assumed


def _is_here(machine: MachineFile, device: torch.device) -> bool:
    if device.type != "cpu" and not torch.accelerator.is_available():
        return False
    try:
        return facts_of(device).device_name == machine.device_name
    except (AssertionError, RuntimeError):  # torch is built without such devices
        return False


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantisedLayer, dtype: torch.dtype) -> Tensor:
        weight = layer.dequantised(x, dtype)
        ctx.layer, ctx.dtype = layer, dtype
        if layer.may_be_kept:
            return functional.linear(x, weight)
        scales = weight.new_empty(len(weight))  # in the type of the product, which they come behind
        ctx.save_for_backward(weight, scales)
        return functional.linear(x, weight) * scales

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        (weight, *_) = ctx.saved_tensors or (ctx.layer.dequantised(gradient, ctx.dtype),)
        return gradient @ weight, None, None
