"""Where root parameters are updated on a device with memory of its own: on the host, or there."""

import threading

import pytest
import torch

import stronghold
from stronghold.engine import engine_of
from tests.delayed import Apart
from tests.small import ADAMW, Residual, assert_unchanged, numbers, pair
from tests.small import snapshot as kept

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def loaded(dtype=torch.float32):
    """Returns a model with gradients, its optimizer, and a gate that the next copy down waits for."""
    device, gate = Apart(), threading.Event()
    _, model = pair(Residual, device=device, dtype=dtype)
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW)
    model.eval()(numbers(1)[0].to(dtype)).backward()
    device.gradients.submit(gate.wait)
    return model, optimizer, gate


def after_one_step(dtype=torch.float32):
    """Returns what the same step makes of the model with nothing late."""
    model, optimizer, gate = loaded(dtype)
    gate.set()
    optimizer.step()
    optimizer.zero_grad()
    return kept(model, optimizer)


@DTYPES
def test_a_step_returns_before_the_gradients_of_the_root_are_down(dtype):
    model, optimizer, gate = loaded(dtype)
    threading.Timer(10, gate.set).start()
    optimizer.step()
    assert not gate.is_set(), "it waited for the copies"
    optimizer.zero_grad()
    gate.set()
    assert_unchanged(after_one_step(dtype), model, optimizer)


@pytest.mark.parametrize("how", ["through itself", "through an alias"])
def test_what_the_user_writes_into_a_gradient_after_the_step_does_not_reach_it(how):
    model, optimizer, gate = loaded()
    threading.Timer(0.3, gate.set).start()
    gradient = model.into.weight.grad
    if how == "through an alias":
        gradient = gradient.detach()
    optimizer.step()
    assert gate.is_set() == (how == "through an alias"), "nothing tells of what is written there"
    gradient.fill_(1e6)
    assert gate.is_set()
    optimizer.zero_grad()
    assert_unchanged(after_one_step(), model, optimizer)


def test_gradients_are_let_go_of_once_the_computation_is_behind_their_copy():
    model, optimizer, gate = loaded()
    threading.Timer(10, gate.set).start()
    optimizer.step()
    root = [unit for unit in engine_of(model).units if unit.is_root]
    assert all(unit.update_reads for unit in root)
    gate.set()
    model(numbers(1)[0])
    assert not any(unit.update_reads for unit in root)
