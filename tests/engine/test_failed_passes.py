"""What the user writes into a model whose backward pass has failed: its open layer lies in a slot, as no other does."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import stronghold
from tests.test_ordering import Model


def load(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    model.load_state_dict(state)


def copy_into(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])


def copy_into_data(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data.copy_(state[name])


def set_data(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = state[name].clone()


def add_to(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.zero_().add_(state[name])


def fail(model: nn.Module, layer: int, inputs: torch.Tensor) -> None:
    """Has a backward pass end with an error where it comes to a layer: the one behind it is in its slot."""

    def refuse(*_: object) -> None:
        raise ArithmeticError

    handle = model.layers[layer].register_full_backward_pre_hook(refuse)
    with pytest.raises(ArithmeticError):
        model(inputs).sum().backward()
    handle.remove()


@pytest.mark.parametrize("write", [load, copy_into, copy_into_data, set_data, add_to])
@pytest.mark.parametrize(
    "settings",
    [{"window": 1}, {"window": 2, "dtype": torch.bfloat16}, {"window": 1, "resident": 2}, {"window": 1, "store": True}],
    ids=["window", "bf16", "resident", "disk"],
)
@pytest.mark.parametrize("failing", [0, 1])
def test_what_is_written_after_a_pass_that_failed_is_what_the_next_one_has(tmp_path, write, settings, failing):
    settings = {**settings, "store": tmp_path} if "store" in settings else settings
    dtype = settings.get("dtype", torch.float32)
    model = Model()
    plain = copy.deepcopy(model).to(dtype)
    model = stronghold.offload(model, device="cpu", **settings)
    inputs = torch.arange(48.0).reshape(6, 8).to(dtype) / 48
    fail(model, failing, inputs)
    state = {name: value * 0.5 for name, value in plain.state_dict().items()}
    write(model, state)
    plain.load_state_dict(state)
    output = model(inputs)
    assert torch.equal(output, plain(inputs))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for each, found in ((model, output), (plain, plain(inputs))):
        each.zero_grad()
        found.sum().backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_copy_after_a_pass_that_failed_is_a_plain_model(copied, failing):
    plain = Model()
    model = stronghold.offload(Model(), window=1, device="cpu")
    inputs = torch.arange(48.0).reshape(6, 8) / 48
    fail(model, failing, inputs)
    found = copied(model)
    assert {type(parameter) for parameter in found.parameters()} == {nn.Parameter}
    assert torch.equal(found(inputs), plain(inputs))
    assert torch.equal(model(inputs), plain(inputs))
