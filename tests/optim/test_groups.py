"""What somebody writes into a group, or the optimizer, after it was made is heeded or refused, before any write."""

import math

import pytest
import torch

import stronghold
from stronghold.errors import OffloadedModelError
from tests.small import ADAMW, Residual, assert_close, assert_same_models, numbers, ordinary_loop, pair

UPDATE = pytest.mark.parametrize("update", ["deferred", "in_backward"])
SET = {
    "maximize": True,
    "amsgrad": True,
    "differentiable": True,
    "decoupled_weight_decay": False,
    "lr": math.nan,
    "betas": (0.9, 1.5),
    "eps": -1e-8,
    "weight_decay": math.inf,
}


def groups(model):
    return [{"params": model.layers.parameters(), "lr": 3e-2}, {"params": model.out.parameters(), "weight_decay": 0.3}]


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def backward_and_step(model, optimizer, batch):
    model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def refused(model, optimizer, batch, kind, match):
    """Asserts that the step raises and writes nothing."""
    model.zero_grad()
    before, steps = weights(model), [s["step"].item() for s in optimizer.state.values()]
    with pytest.raises(kind, match=match):
        backward_and_step(model, optimizer, batch)
    model.zero_grad()
    assert_close(weights(model), before, rtol=0.0, atol=0.0)
    assert [s["step"].item() for s in optimizer.state.values()] == steps


@UPDATE
@pytest.mark.parametrize("name", SET)
def test_a_setting_that_is_not_supported_is_refused_at_the_step(name, update):
    plain, model = pair(Residual, resident=1)
    optimizer = stronghold.AdamW(groups(model), **ADAMW, update=update)
    expected = torch.optim.AdamW(groups(plain), **ADAMW)
    one, *rest = numbers(3)
    for each, adamw in ((model, optimizer), (plain, expected)):
        torch.manual_seed(1)
        ordinary_loop(each, adamw, [one])
        each.zero_grad()
    was = optimizer.param_groups[1][name]
    optimizer.param_groups[1][name] = SET[name]
    refused(model, optimizer, one, ValueError, name)
    optimizer.param_groups[1][name] = was
    for each, adamw in ((model, optimizer), (plain, expected)):
        torch.manual_seed(2)
        ordinary_loop(each, adamw, rest)
    assert_same_models(model, plain)


@UPDATE
@pytest.mark.parametrize("change", ["dropped", "reordered", "emptied", "added"])
def test_groups_with_other_parameters_than_were_given_are_refused(change, update):
    _, model = pair(Residual)
    optimizer = stronghold.AdamW(groups(model), **ADAMW, update=update)
    ordinary_loop(model, optimizer, numbers(1))
    if change == "dropped":
        optimizer.param_groups.pop(0)
    elif change == "reordered":
        optimizer.param_groups.reverse()
    elif change == "emptied":
        optimizer.param_groups[0]["params"].pop()
    else:
        optimizer.param_groups[0]["params"].append(model.into.weight)
    refused(model, optimizer, numbers(1)[0], OffloadedModelError, r"must be those .* add_param_group")


@pytest.mark.parametrize(
    ("name", "value", "update"),
    [
        ("max_grad_norm", math.nan, "deferred"),
        ("max_grad_norm", -1.0, "deferred"),
        ("max_grad_norm", 1.0, "in_backward"),
        ("nonfinite", "ignore", "deferred"),
    ],
)
def test_what_is_set_of_the_optimizer_itself_is_checked_too(name, value, update):
    _, model = pair(Residual)
    optimizer = stronghold.AdamW(groups(model), **ADAMW, update=update)
    ordinary_loop(model, optimizer, numbers(1))
    setattr(optimizer, name, value)
    refused(model, optimizer, numbers(1)[0], ValueError, name)


def test_settings_that_are_tensors_or_lists_are_those_of_the_step():
    """The update runs behind the step, when the user may have changed them."""
    results = []
    for late in (False, True):
        _, model = pair(Residual)
        optimizer = stronghold.AdamW(groups(model), **ADAMW)
        group = optimizer.param_groups[0]
        group.update(betas=[0.8, 0.9], eps=torch.tensor(1e-3), weight_decay=torch.tensor(0.2))
        torch.manual_seed(1)
        model(numbers(1)[0]).backward()
        device = model.out.weight._unit.owner.device
        device.updates.run(lambda: __import__("time").sleep(0.1))
        optimizer.step()
        if late:
            group["betas"][0] = 0.1
            group["eps"].fill_(1.0)
            group["weight_decay"].fill_(9.0)
        results.append(weights(model))
    assert_close(results[1], results[0], rtol=0.0, atol=0.0)
