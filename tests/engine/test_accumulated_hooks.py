"""A hook behind the accumulation of a layer's gradient sees, and may write, the sum over a step's backward passes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import stronghold
from tests.gpu import DEVICE, needs_device
from tests.small import SIZE, Residual

PASSES = 3
ON_A_DEVICE = pytest.param(DEVICE, marks=[pytest.mark.gpu, needs_device])


def base() -> nn.Module:
    torch.manual_seed(0)
    model = Residual()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def accumulated(model: nn.Module, device: str, *, write: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns what the hooks saw, pass by pass, and the gradients at the end."""
    seen: list[torch.Tensor] = []

    def hook(parameter: nn.Parameter) -> None:
        seen.append(parameter.grad.cpu().clone())
        if write:
            parameter.grad = parameter.grad.clamp(-1e-3, 1e-3)

    for block in model.layers:
        block.up.weight.register_post_accumulate_grad_hook(hook)
        block.norm.bias.register_post_accumulate_grad_hook(hook)
    for number in range(PASSES):
        x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(number))
        model(x.to(device)).backward()
    return seen, [parameter.grad.cpu().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("device", ["cpu", ON_A_DEVICE])
@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"window": 1},
        {"window": 2, "activations": "keep"},
        {"window": 1, "resident": 2},
        {"window": 2, "micro_batch": 2},
    ],
    ids=["recomputed", "kept", "resident", "micro-batches"],
)
def test_it_sees_and_writes_the_sum(settings, write, device):
    seen, gradients = accumulated(base().to(device), device, write=write)
    model = stronghold.offload(copy.deepcopy(base()), device=device, **settings)
    its, found = accumulated(model, device, write=write)
    assert len(its) == len(seen) == PASSES * 2 * len(model.layers)
    for one, other in zip([*its, *found], [*seen, *gradients], strict=True):
        if "micro_batch" in settings:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(one, other)


def sums(dtype: torch.dtype, *, looks: bool) -> list[torch.Tensor]:
    """Returns the masters behind a step with the sum of many gradients, at which a hook has looked or not."""
    model = stronghold.offload(base(), device="cpu", dtype=dtype, window=1)
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.1)
    first = None
    for block in model.layers if looks else ():
        for parameter in block.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    for number in range(16):
        model(torch.randn(4, SIZE, generator=torch.Generator().manual_seed(number)).to(dtype)).backward()
        first = first if number else model.layers[0].up.weight.grad
    assert model.layers[0].up.weight.grad is first
    optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_that_only_looks_changes_nothing(dtype):
    """Neither the sum, in fp32 whatever the compute type is, nor which tensor has it."""
    assert all(map(torch.equal, sums(dtype, looks=True), sums(dtype, looks=False)))


@pytest.mark.parametrize("settings", [{"window": 1}, {"window": 1, "resident": 2}])
def test_one_may_drop_the_sum(settings):
    def trained(model: nn.Module) -> list[bool]:
        weight = model.layers[0].up.weight
        for number in range(2):
            if number:
                weight.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
            model(torch.randn(4, SIZE, generator=torch.Generator().manual_seed(number))).backward()
        return [parameter.grad is None for parameter in model.parameters()]

    assert trained(stronghold.offload(base(), device="cpu", **settings)) == trained(base())


@pytest.mark.parametrize("where", ["a layer", "the root"])
def test_one_that_returns_something_is_refused_as_pytorch_refuses_it(where: str) -> None:
    model = stronghold.offload(base(), window=2, device="cpu")
    parameter = model.layers[1].up.weight if where == "a layer" else next(iter(model.parameters()))
    assert where == "a layer" or not any(parameter is one for one in model.layers.parameters())
    handle = parameter.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(0.5))
    with pytest.raises(RuntimeError, match=r"Tensor post accumulate grad hooks should return None\."):
        model(torch.ones(2, 3, SIZE)).sum().backward()
    handle.remove()
    model(torch.ones(2, 3, SIZE)).sum().backward()
    assert parameter.grad is not None
