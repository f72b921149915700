"""What the user writes into a model whose backward pass has failed: its open layer lies in a slot, as no other does."""

from __future__ import annotations

import copy
import ctypes
import pickle

import pytest
import torch
from torch import nn

import stronghold
from stronghold.engine import engine_of
from stronghold.errors import OffloadedModelError
from stronghold.unit import index_of, unit_of
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


HELD = {
    "state_dict": lambda model: model.state_dict(),
    "data": lambda model: {name: parameter.data for name, parameter in model.named_parameters()},
    "numpy": lambda model: {name: parameter.detach().numpy() for name, parameter in model.named_parameters()},
}
"""Ways to hold the memory of a model's parameters."""


def write_held(held: dict, state: dict[str, torch.Tensor]) -> None:
    """Writes the values of ``state`` through memory that was held before."""
    with torch.no_grad():
        for name, value in state.items():
            held[name][...] = value if isinstance(held[name], torch.Tensor) else value.numpy()


def failed(failing: int, held: str, **settings):
    """Returns a model whose backward pass has failed, what was held of it before, the plain one and half its state."""
    dtype = settings.get("dtype", torch.float32)
    model = Model()
    plain = copy.deepcopy(model).to(dtype)
    model = stronghold.offload(model, device="cpu", **settings)
    memory = HELD[held](model)
    fail(model, failing, INPUTS.to(dtype))
    return model, memory, plain, {name: value * 0.5 for name, value in plain.state_dict().items()}


INPUTS = torch.arange(48.0).reshape(6, 8) / 48


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("held", [*HELD])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    "settings", [{"window": 1}, {"window": 2, "activations": "keep"}, {"window": 1, "store": True}]
)
def test_what_is_written_through_memory_that_was_held_before_is_there(tmp_path, settings, failing, held, kept):
    settings = {**settings, "store": tmp_path} if "store" in settings else settings
    model, memory, plain, state = failed(failing, held, **settings)
    write_held(memory, state)
    if not kept:
        del memory
    plain.load_state_dict(state)
    assert torch.equal(model(INPUTS), plain(INPUTS))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for each in (model, plain):
        each.zero_grad()
        each(INPUTS).sum().backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


@pytest.mark.parametrize("held", ["state_dict", "data"])
def test_in_bf16_a_weight_written_through_memory_held_before_is_its_own_master(held):
    settings = {"window": 1, "dtype": torch.bfloat16}
    model, memory, plain, state = failed(1, held, **settings)
    write_held(memory, state)
    plain.load_state_dict(state)
    assert torch.equal(model(INPUTS.bfloat16()), plain(INPUTS.bfloat16()))
    engine = engine_of(model)
    for name, parameter in model.named_parameters():
        master = engine.settled_value(unit_of(parameter), index_of(parameter), exact=True)
        assert torch.equal(master, state[name].float()), name


@pytest.mark.parametrize("held", [*HELD])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_held_state_changes_nothing_of_what_is_written_by_the_parameters(held, failing):
    model, memory, plain, state = failed(failing, held, window=1)
    load(model, state)
    plain.load_state_dict(state)
    assert torch.equal(model(INPUTS), plain(INPUTS))
    assert all(torch.equal(torch.as_tensor(memory[name]), value) for name, value in state.items())


@pytest.mark.parametrize("held", [*HELD])
@pytest.mark.parametrize("failing", [0, 1])
def test_what_is_written_both_ways_is_refused_once_and_then_written_again(held, failing):
    model, memory, plain, state = failed(failing, held, window=1)
    write_held(memory, state)
    copy_into_data(model, {name: value * 0.5 for name, value in state.items()})
    with pytest.raises(OffloadedModelError, match=r"got both in layers\.\d, .*write all values again"):
        model(INPUTS)
    write_held(memory, state)
    plain.load_state_dict(state)
    assert torch.equal(model(INPUTS), plain(INPUTS))


@pytest.mark.parametrize("held", [*HELD])
def test_a_failed_pass_alone_changes_nothing_that_is_held(held):
    model, memory, plain, _ = failed(1, held, window=1)
    assert torch.equal(model(INPUTS), plain(INPUTS))
    assert all(torch.equal(torch.as_tensor(memory[name]), value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("failing", [0, 1])
def test_what_a_pointer_that_was_held_writes_in_a_writing_block_is_there(failing):
    plain = Model()
    model = stronghold.offload(Model(), device="cpu", window=1)
    pointers = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    fail(model, failing, INPUTS)
    state = {name: value * 0.5 for name, value in plain.state_dict().items()}
    with stronghold.writing(model):
        for name, value in state.items():
            ctypes.memmove(pointers[name], value.data_ptr(), value.nbytes)
    plain.load_state_dict(state)
    assert torch.equal(model(INPUTS), plain(INPUTS))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
