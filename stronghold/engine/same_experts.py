"""Whether experts in parts compute what the whole computes: both do with a few random tokens, before any of a batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from stronghold.device import drawn_apart
from stronghold.engine.experts_part import COUNT, alike
from stronghold.engine.joining import are_equal
from stronghold.errors import OffloadedModelError

_TOKENS, _VALUES = 3, 8192
"""Of tokens at least so many, and of numbers in them: two types may round seldom to other values."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_SAME: WeakKeyDictionary[type, set[Hashable]] = WeakKeyDictionary()
"""What was compared, by the class of experts."""


def check_same(
    some: nn.Module,
    experts: int,
    cut: Callable[[nn.Module], Callable[..., Tensor]],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> None:
    """Compares experts as ``some``, so many ``experts``, with their parts, which ``cut`` makes without copies.

    Once for a class, its flags, the types of the tensors that it is called with, and autocast: a class may add up in
    another type than the tokens', or in another order. The outputs are compared and, where autograd can compute them,
    the gradients of the tokens and of the routing weights, also where the call itself has none: a checkpoint's first
    run may be such a call. Each expert's own gradients are those of the same calls. It takes the memory of one expert,
    with random weights, and the time of a few tokens. Nothing of the user's changes, and no random number is drawn.
    Raises OffloadedModelError where an element differs.
    """
    if isinstance(hidden_states, FakeTensor) or hidden_states.is_meta:
        return
    device, choices, width = hidden_states.device, top_k_index.shape[1], hidden_states.shape[1]
    count = max(_TOKENS, _VALUES // width)
    autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    types = hidden_states.dtype, top_k_index.dtype, top_k_weights.dtype, *(p.dtype for p in some.parameters())
    flags = tuple((n, value) for n, value in vars(some).items() if isinstance(value, (bool, str, torch.dtype)))
    key = (types, flags, autocast, device.type, choices, experts)
    if key in (compared := _SAME.setdefault(type(some), set())):
        return

    def compare() -> str | None:
        casts = torch.autocast(device.type, autocast[1], enabled=autocast[0], cache_enabled=False)
        with casts, torch.enable_grad():
            generator = torch.Generator().manual_seed(0)
            whole = _of_one(some, experts, generator, device)
            shape, dtype = (count, width), hidden_states.dtype
            tokens, upstream = (_random(shape, generator).to(device, dtype) for _ in range(2))
            weights = (_random((count, choices), generator).abs() + 0.1).to(device, top_k_weights.dtype)
            index = _choices(count, experts, choices).to(top_k_index)
            found = [_computed(one, tokens, index, weights, upstream) for one in (whole, cut(whole))]
            return _difference(*found)

    difference = _unseen(compare, device)
    if difference is not None:
        where = f", autocast in {autocast[1]}" if autocast[0] else ""
        raise OffloadedModelError(
            "experts in parts must compute what the whole computes, and parts add up what a token gets in the type of "
            f"the tokens, expert by expert (got {type(some).__name__}, which adds up otherwise: with {count} random "
            f"tokens in {hidden_states.dtype}, {choices} experts each, weighted in {top_k_weights.dtype}{where}, "
            f"{difference}); leave the layers whole, without experts_per_part, or have transformers' classes compute "
            "with experts_implementation='grouped_mm'"
        )
    compared.add(key)


def _unseen(compare: Callable[[], str | None], device: torch.device) -> str | None:
    """Returns what ``compare`` does, which no hook for saved tensors, mode or transform of the user's sees."""
    if torch._C._current_graph_task_id() != -1:
        # Autograd computes gradients on a device in one thread, which is this one: another would wait for it for ever.
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor), _disable_current_modes():
            return compare()

    def on_device() -> str | None:
        if device.type != "cpu":  # a new thread begins with the first device
            torch.accelerator.set_device_index(device)
        return compare()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(on_device).result()


def _of_one(some: nn.Module, experts: int, generator: torch.Generator, device: torch.device) -> nn.Module:
    """Returns ``experts`` as ``some`` without hooks, all of them with the memory of one, whose weights are random."""
    whole = alike(some)
    setattr(whole, COUNT, experts)
    for kind in _HOOKS:
        getattr(whole, kind).clear()
    for name, parameter in some._parameters.items():
        if parameter is not None:
            shape = parameter.shape[1:]
            one = (_random(shape, generator) / max(shape, default=1) ** 0.5).to(device, parameter.dtype)
            whole._parameters[name] = nn.Parameter(one.expand(experts, *shape), requires_grad=False)
    for name, buffer in some._buffers.items():
        whole._buffers[name] = None if buffer is None else buffer.to(device, copy=True)
    return whole


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _choices(tokens: int, experts: int, choices: int) -> Tensor:
    """Returns for each token as many experts, some of all parts, in another order for each token."""
    among = max(choices, min(choices + 1, experts))
    token, choice = torch.arange(tokens, device="cpu")[:, None], torch.arange(choices, device="cpu")
    return (2 * token - choice) % among * experts // among


def _computed(
    experts: Callable[..., Tensor], tokens: Tensor, index: Tensor, weights: Tensor, upstream: Tensor
) -> dict[str, Tensor]:
    """Returns what ``experts`` make of the tokens, and the gradients of their inputs."""
    inputs = [one.detach().clone().requires_grad_() for one in (tokens, weights)]
    with drawn_apart(tokens.device):
        output: Any = experts(inputs[0], index.clone(), inputs[1])
        found = {"outputs": output}
        if output.requires_grad:
            gradients = torch.autograd.grad(output, inputs, upstream.to(output.dtype), allow_unused=True)
            named = zip(("gradients of the tokens", "gradients of the weights"), gradients, strict=True)
            found.update((name, gradient) for name, gradient in named if gradient is not None)
    return found


def _difference(whole: dict[str, Tensor], parts: dict[str, Tensor]) -> str | None:
    """Returns how ``parts`` differs from ``whole``, None where no element does."""
    for name, expected in whole.items():
        got = parts.get(name)
        if got is None or (got.dtype, got.shape) != (expected.dtype, expected.shape):
            there = "none" if got is None else f"{got.dtype} of {tuple(got.shape)}"
            return f"{name} are {expected.dtype} of {tuple(expected.shape)} of the whole, and {there} of parts"
        if not are_equal(expected, got):
            most = (expected - got).abs().max().item()
            return f"{name} differ by up to {most:.3g} where the largest is {expected.abs().max().item():.3g}"
    return None
