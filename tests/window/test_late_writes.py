"""Gradients that a hook keeps and writes when others come: as plain PyTorch has it, or refused."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

import stronghold
from stronghold.errors import OffloadedModelError
from tests.engine.test_parts import gradients_of
from tests.small import Residual, assert_close, numbers, pair

TAKEN = r"a gradient of layers\.{} is taken when its own hooks have been called"


def keep_and_halve(parameters: list[nn.Parameter]) -> None:
    """Has all gradients halved when the last of them comes."""
    kept: list[Tensor] = []

    def keep(parameter: nn.Parameter) -> None:
        kept.append(parameter.grad)
        if len(kept) == len(parameters):
            for gradient in kept:
                gradient.mul_(0.5)
            kept.clear()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(keep)


def backward(model: nn.Module, batch: Tensor) -> None:
    torch.manual_seed(3)
    model(batch.to(model.out.weight.dtype)).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("update", [None, "deferred", "in_backward"])
@pytest.mark.parametrize("layers", [(1,), (1, 2)])
def test_a_write_behind_the_copy_is_refused(layers, update, dtype):
    """Where the gradients are of several layers, those of the first to come are on the host when it is written."""
    model = pair(Residual, dtype=dtype)[1]
    optimizer = None if update is None else stronghold.AdamW(model.parameters(), update=update)
    batch = numbers(1)[0]
    if optimizer is not None:
        backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()
    keep_and_halve([parameter for layer in layers for parameter in model.layers[layer].parameters()])
    with pytest.raises(OffloadedModelError, match=TAKEN.format(max(layers))):
        backward(model, batch)


def test_what_is_refused_leaves_the_model_usable():
    plain, model = pair(Residual)
    first, second = numbers(2)
    written, hooks = model.layers[2].up, []
    hooks.append(written.weight.register_post_accumulate_grad_hook(lambda p: hooks.append(p.grad)))
    hooks.append(written.bias.register_post_accumulate_grad_hook(lambda p: hooks.append(p.grad)))
    handle = model.layers[1].up.weight.register_hook(lambda gradient: [g.zero_() for g in hooks[2:]] and None)
    with pytest.raises(OffloadedModelError, match=TAKEN.format(2)):
        backward(model, first)
    handle.remove()
    for one in hooks[:2]:
        one.remove()
    model.zero_grad()
    for one in (plain, model):
        backward(one, second)
    assert_close(gradients_of(model), gradients_of(plain))


@pytest.mark.parametrize("settings", [{"window": 2}, {"window": 2, "resident": 4}], ids=str)
def test_writes_in_a_gradients_own_hook_and_behind_the_pass_are_in_it(settings):
    def halve(parameter: nn.Parameter) -> None:
        kept.append(parameter.grad)
        parameter.grad.mul_(0.5)

    models, kept = pair(Residual, **settings), list[Tensor]()
    for model in models:
        for parameter in model.layers.parameters():
            parameter.register_post_accumulate_grad_hook(halve)
        for batch in numbers(2):
            model.zero_grad()
            backward(model, batch)
            for gradient in kept:
                gradient.add_(1)
            kept.clear()
            if model is models[1] and "resident" not in settings:  # those were copied
                for parameter in model.layers.parameters():
                    parameter.grad.add_(1)
    assert_close(gradients_of(models[1]), gradients_of(models[0]))


def test_resident_gradients_are_written_where_they_are():
    models = pair(Residual, window=1, resident=4)
    for model in models:
        keep_and_halve(list(model.layers.parameters()))
        for batch in numbers(2):
            model.zero_grad()
            backward(model, batch)
    assert_close(gradients_of(models[1]), gradients_of(models[0]))


def test_a_gradient_that_no_hook_keeps_is_not_kept():
    model = pair(Residual, window=1)[1]
    seen: list[weakref.ref[Tensor]] = []
    for parameter in model.layers.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(weakref.ref(p.grad)))
    alive: list[int] = []
    model.layers[0].up.weight.register_hook(lambda gradient: alive.append(sum(one() is not None for one in seen)))
    backward(model, numbers(1)[0])
    assert len(seen) > 12
    assert len(alive) == 1 and alive[0] < len(list(model.layers[0].parameters()))


def test_what_is_kept_of_a_pass_that_has_failed_may_be_written():
    plain, model = pair(Residual, window=1)
    first, second = numbers(2)
    kept: list[Tensor] = []
    for parameter in model.layers[2].parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))

    def refuse(module: nn.Module, gradients: object) -> None:
        raise ArithmeticError

    handle = model.layers[0].register_full_backward_pre_hook(refuse)
    with pytest.raises(ArithmeticError):
        backward(model, first)
    handle.remove()
    assert kept
    for gradient in kept:
        gradient.zero_()
    model.zero_grad()
    for one in (plain, model):
        backward(one, second)
    assert_close(gradients_of(model), gradients_of(plain))
