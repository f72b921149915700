"""Whatever a step refuses, it refuses before its first write: no weight, moment or count has changed."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

import stronghold
from stronghold.errors import StrongholdError
from stronghold.unit import Unit
from tests.small import ADAMW, SIZE, Frozen, Residual, assert_close, assert_unchanged, follow, numbers, pair, snapshot

PLACEMENTS = [{}, {"resident": 2}, {"dtype": torch.bfloat16}, {"store": "disk"}]


def placed(settings, path):
    return {**settings, "store": path} if "store" in settings else settings


class Stacked(nn.Module):
    """Parameters that are stacked and summed: autograd gives them gradients that share memory."""

    def __init__(self):
        super().__init__()
        self.terms = nn.ParameterList(torch.randn(SIZE) for _ in range(3))
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return self.linear(x) + torch.stack(list(self.terms)).sum(0)


class StackedRoot(Residual):
    def __init__(self):
        super().__init__(block=Stacked)
        self.shift, self.other = nn.Parameter(torch.randn(SIZE)), nn.Parameter(torch.randn(SIZE))

    def forward(self, x):
        return super().forward(x + torch.stack([self.shift, self.other]).sum(0))


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
@pytest.mark.parametrize("resident", [0, 2, 4])
def test_gradients_that_share_memory(resident, update):
    follow(StackedRoot, numbers(3), ours_only={"update": update}, resident=resident)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_gradients_that_share_memory_are_those_of_gradients_that_do_not(dtype):
    """To such a gradient plain PyTorch adds once for each parameter that has it."""
    models = [pair(StackedRoot, dtype=dtype, resident=resident)[1] for resident in (0, 4)]
    batches = [batch.to(dtype) for batch in numbers(3)]
    for model in models:
        for batch in batches:
            model(batch).backward()
    streamed, resident = ({name: p.grad.float() for name, p in model.named_parameters()} for model in models)
    assert_close(resident, streamed, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    for gradients in (streamed, resident):
        assert_close(gradients["other"], gradients["shift"], rtol=0.0, atol=0.0)
        assert_close(gradients["layers.2.terms.1"], gradients["layers.2.terms.0"], rtol=0.0, atol=0.0)
    plain = pair(StackedRoot)[0]
    if dtype == torch.float32:
        alone = [torch.autograd.grad(plain(batch), plain.shift)[0] for batch in batches]
        assert_close(streamed["shift"], sum(alone))


@pytest.mark.parametrize("resident", [0, 4])
def test_one_tensor_as_the_gradient_of_several_parameters(resident):
    def loop(model, optimizer, batches):
        for batch in batches:
            model(batch).backward()
            for layer in model.layers:
                layer.norm.bias.grad = layer.norm.weight.grad
            optimizer.step()
            optimizer.zero_grad()

    follow(Residual, numbers(3), loop, resident=resident)


@contextmanager
def overlapping(model, optimizer, parameter):
    kept, parameter.grad = parameter.grad, parameter.detach()
    yield
    parameter.grad = kept


@contextmanager
def other_moment(model, optimizer, parameter):
    state = optimizer.state[parameter]
    kept, state["exp_avg"] = state["exp_avg"], state["exp_avg"].double()
    yield
    state["exp_avg"] = kept


@contextmanager
def other_step(model, optimizer, parameter):
    state = optimizer.state[parameter]
    kept, state["step"] = state["step"], torch.tensor(0.5)
    yield
    state["step"] = kept


@contextmanager
def sparse(model, optimizer, parameter):
    kept, parameter.grad = parameter.grad, parameter.grad.to_sparse()
    yield
    parameter.grad = kept


@pytest.mark.parametrize("settings", PLACEMENTS, ids=str)
@pytest.mark.parametrize("fault", [overlapping, other_moment, other_step, sparse], ids=lambda fault: fault.__name__)
def test_a_step_that_one_unit_refuses_changes_nothing(fault, settings, tmp_path):
    model = pair(Residual, **placed(settings, tmp_path))[1]
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW)
    batches = [batch.to(model.out.weight.dtype) for batch in numbers(2)]
    for batch in batches:
        optimizer.zero_grad()
        model(batch).backward()
        if batch is batches[0]:
            optimizer.step()
    before = snapshot(model, optimizer)
    units = [model.into.weight, *(layer.down.weight for layer in model.layers), model.out.bias]
    for parameter in units:
        with fault(model, optimizer, parameter), pytest.raises(StrongholdError, match=r"nothing was updated|sparse"):
            optimizer.step()
        assert_unchanged(before, model, optimizer)
    optimizer.step()
    assert {float(state["step"]) for state in optimizer.state_dict()["state"].values()} == {2.0}


@pytest.mark.parametrize("settings", PLACEMENTS, ids=str)
@pytest.mark.parametrize("kind", ["moments", "remainders"])
def test_memory_that_one_unit_lacks_stops_the_step_before_its_first_write(kind, settings, tmp_path, monkeypatch):
    """Layers that are unfrozen get states, and remainders, in the step: all of them, or none."""
    if kind == "remainders" and settings.get("dtype") is None:
        settings = {**settings, "dtype": torch.bfloat16}
    model = pair(lambda: Frozen().to(settings.get("dtype")), **placed(settings, tmp_path))[1]
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW)
    model.requires_grad_(True)
    model(numbers(1)[0].to(model.out.weight.dtype)).backward()
    before, allocate = snapshot(model, optimizer), Unit.allocate
    for name in ("into.weight", "layers.2", "layers.3") if kind == "moments" else ("into.weight", "layers.2"):

        def fail(unit, length_bytes, kind_, name=name):
            if unit.name == name and kind_ == kind:
                raise MemoryError("no memory for it")
            return allocate(unit, length_bytes, kind_)

        monkeypatch.setattr(Unit, "allocate", fail)
        with pytest.raises(MemoryError, match="no memory for it"):
            optimizer.step()
        monkeypatch.setattr(Unit, "allocate", allocate)
        assert_unchanged(before, model, optimizer)
    optimizer.step()
    assert {float(state["step"]) for state in optimizer.state_dict()["state"].values()} == {1.0}
