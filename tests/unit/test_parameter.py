"""A parameter of an offloaded model is an ordinary tensor, and whoever reads it waits for its update."""

import copy
import io
import pickle
import time

import pytest
import torch
from torch import nn

import stronghold
from stronghold.errors import OffloadedModelError
from stronghold.unit import OffloadedGradient, OffloadedParameter
from tests.small import ADAMW, Residual, assert_close, numbers, pair

LAYER, ROOT = "layers.1.up.weight", "out.weight"


@pytest.fixture
def late():
    """A model whose updates are under way and late, and what its parameters will be."""
    plain, model = pair(Residual)
    optimizers = torch.optim.AdamW(plain.parameters(), **ADAMW), stronghold.AdamW(model.parameters(), **ADAMW)
    for one, optimizer in zip((plain, model), optimizers, strict=True):
        one.eval()
        one(numbers(1)[0]).backward()
        if one is model:
            one.out.weight._unit.owner.device.updates.run(lambda: time.sleep(0.15))
        optimizer.step()
    return model, plain, optimizers[1]


READERS = {
    "arithmetic": lambda p: p + 0,
    "data": lambda p: p.data.clone(),
    "detach": lambda p: p.detach().clone(),
    "clone": lambda p: p.clone(),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "index": lambda p: p[:],
    "list": lambda p: torch.tensor(p.tolist()),
    "stack": lambda p: torch.stack([p])[0],
    "foreach": lambda p: torch._foreach_mul([p], 1.0)[0],
    "deepcopy": lambda p: copy.deepcopy(p),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "save": lambda p: _saved(p),
    "storage": lambda p: torch.frombuffer(bytearray(p.untyped_storage()), dtype=torch.float32).view(p.shape).clone(),
    "out": lambda p: torch.mul(p.detach(), 1.0, out=torch.empty_like(p)),
    "keyword": lambda p: torch.add(input=torch.zeros(p.shape), other=p),
}


def _saved(parameter):
    file = io.BytesIO()
    torch.save({"p": parameter}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["p"]


@pytest.mark.parametrize("name", [LAYER, ROOT])
@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_a_parameter_waits_for_its_update(late, reader, name):
    model, plain, _ = late
    with torch.no_grad():
        got = READERS[reader](model.get_parameter(name))
    assert type(got) in (torch.Tensor, nn.Parameter)
    assert_close(got.detach(), plain.get_parameter(name).detach())


@pytest.mark.parametrize("name", [LAYER, ROOT])
def test_whoever_writes_a_parameter_waits_for_its_update(late, name):
    model, plain, _ = late
    for one in (model, plain):
        with torch.no_grad():
            one.get_parameter(name).mul_(2.0)
    assert_close(model.get_parameter(name).detach(), plain.get_parameter(name).detach())


@pytest.mark.parametrize("name", [LAYER, ROOT])
def test_data_is_copied_in(name):
    _, model = pair(Residual)
    parameter = model.get_parameter(name)
    value = torch.randn(parameter.shape)
    address = parameter.data_ptr()
    parameter.data = value
    assert_close(parameter.detach(), value, rtol=0, atol=0)
    assert parameter.data_ptr() == address
    assert value.data_ptr() != address


@pytest.mark.parametrize("settings", [{}, {"resident": 1}, {"dtype": torch.bfloat16}, {"store": True}])
@pytest.mark.parametrize("name", [LAYER, ROOT])
def test_weights_swapped_by_their_data_come_back_or_are_refused(tmp_path, settings, name):
    """As averaged weights are: ``p.data = values`` writes into memory that ``kept = p.data`` has as well."""
    settings = {**settings, "store": tmp_path} if "store" in settings else settings
    plain, model = pair(Residual, **settings)
    plain.to(settings.get("dtype", torch.float32))
    inputs = numbers(1)[0].to(settings.get("dtype", torch.float32))
    results = []
    for one in (plain, model):
        parameter = one.eval().get_parameter(name)
        kept, before, values = parameter.data, parameter.data.clone(), torch.zeros_like(parameter)
        if one is model:
            with pytest.raises(OffloadedModelError, match=r"still held .*kept = p.data.clone\(\)"):
                parameter.data = values
            assert torch.equal(kept, before)
            kept = before
        parameter.data = values
        with torch.no_grad():
            zeroed = one(inputs)
            assert not parameter.any()
            parameter.data = kept
            assert torch.equal(parameter, before)
            results.append((zeroed, one(inputs)))
    assert all(map(torch.equal, *results))


def test_data_that_is_a_parameters_own_may_be_set(late):
    """``p.data += 1`` does, where nothing but the model holds it."""
    model, plain, _ = late
    for one in (plain, model):
        parameter = one.get_parameter(LAYER)
        parameter.data += 1
        parameter.data = parameter.data.mul(2)
    assert_close(model.get_parameter(LAYER), plain.get_parameter(LAYER))


@pytest.mark.parametrize("name", [LAYER, ROOT])
def test_a_parameter_that_was_swapped_for_another_tensor_is_refused(name):
    model = pair(Residual)[1]
    torch.utils.swap_tensors(model.get_parameter(name), nn.Parameter(torch.zeros_like(model.get_parameter(name))))
    with pytest.raises(OffloadedModelError, match=r"swap_tensors has exchanged.*p\.data\.copy_"):
        model(numbers(1)[0])


def test_facts_about_a_parameter_wait_for_nothing(late):
    model, _, optimizer = late
    parameter = model.get_parameter(LAYER)
    unit = parameter._unit
    assert parameter.shape == (32, 16)
    assert (parameter.dtype, parameter.device.type, parameter.ndim) == (torch.float32, "cpu", 2)
    assert (parameter.numel(), len(parameter), parameter.requires_grad, parameter.is_leaf) == (512, 32, True, True)
    assert parameter.grad is not None
    assert parameter.stride() == (16, 1)
    assert unit.updated is not None, "none of these may wait"
    assert not unit.updated.done
    optimizer.wait()


def test_a_parameter_is_an_nn_parameter():
    _, model = pair(Residual)
    for name in (LAYER, ROOT):
        parameter = model.get_parameter(name)
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, OffloadedParameter)
        assert repr(parameter).startswith("Parameter containing")
        assert type(parameter * 1) is torch.Tensor
        assert type(parameter.data) is torch.Tensor


def test_gradients_under_an_update_are_left_alone_until_it_is_done(late):
    model, plain, _ = late
    gradient = model.get_parameter(LAYER).grad
    assert type(gradient) is OffloadedGradient
    gradient.zero_()
    assert type(gradient) is torch.Tensor
    assert_close(model.get_parameter(LAYER).detach(), plain.get_parameter(LAYER).detach())


@pytest.mark.parametrize("use", [copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g)), torch.clone])
def test_a_gradient_under_an_update_can_be_copied(late, use):
    model, plain, _ = late
    got = use(model.get_parameter(LAYER).grad)
    assert type(got) is torch.Tensor
    assert_close(got, plain.get_parameter(LAYER).grad)
