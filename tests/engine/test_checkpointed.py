"""A layer whose forward pass fails leaves no hook behind, whichever PyTorch is installed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import _checkpoint_without_reentrant_generator, noop_context_fn

import stronghold
from stronghold.engine import checkpointed as room
from stronghold.engine.checkpointed import checkpointed
from stronghold.errors import OffloadedModelError


def as_before_2_13(function, *args, use_reentrant, **kwargs):
    """Does as PyTorch's checkpoint did: where ``function`` raises, its hooks stay until the traceback is let go."""
    assert not use_reentrant
    around = _checkpoint_without_reentrant_generator(
        function, True, noop_context_fn, "default", False, True, *args, **kwargs
    )
    kept.append(around)
    next(around)
    output = function(*args, **kwargs)
    next(around, None)
    return output


kept: list = []


@pytest.fixture(params=["this PyTorch's", "an old one's"])
def old(request, monkeypatch):
    if request.param == "an old one's":
        monkeypatch.setattr(room, "checkpoint", as_before_2_13)
    yield
    while kept:
        kept.pop().close()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


class Failing(nn.Linear):
    fails = False

    def forward(self, x):
        if self.fails:
            raise MemoryError("the layer's own")
        return super().forward(x).tanh()


def test_what_is_saved_while_the_error_is_kept_is_what_it_would_have_been(old):
    """An out-of-memory error that is caught and looked at made the next backward pass one of the model before.

    It ended in "layers.0 is gone" where that model was, and computed with its weights where it was not.
    """
    models = [stronghold.offload(nn.Sequential(*(Failing(4, 4) for _ in range(3))), device="cpu") for _ in range(2)]
    models[0][1].fails = True
    with pytest.raises(MemoryError, match=r"^the layer's own$") as refusal:
        models[0](torch.ones(2, 4))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    plain = torch.full((2,), 3.0, requires_grad=True)
    plain.square().sum().backward()
    assert plain.grad.tolist() == [6.0, 6.0]
    models[1](torch.ones(2, 4)).sum().backward()
    models[0][1].fails = False
    models[0](torch.ones(2, 4)).sum().backward()
    assert all(parameter.grad.any() for model in models for parameter in model.parameters())
    assert refusal.tb is not None


def test_an_error_of_the_second_run_comes_from_the_backward_pass(old):
    runs = []

    def compute(x):
        runs.append(len(runs))
        if len(runs) > 1:
            raise ValueError("again")
        return x.square()

    output = checkpointed(compute, torch.ones(2, requires_grad=True))
    with pytest.raises(ValueError, match="again"):
        output.sum().backward()


class Normalised(nn.Module):
    """Reads its parametrized weight twice."""

    def __init__(self):
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x):
        return x + self.linear(torch.tanh(self.linear(x)))


class Once(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Normalised() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def train_cached(model, *, inside, passes):
    torch.manual_seed(0)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(3):
        with nn.utils.parametrize.cached():
            loss = sum(model(torch.randn(3, 4)) for _ in range(passes))
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("activations", "passes"), [("recompute", 1), ("host", 1), ("keep", 1), ("keep", 2)])
def test_parametrized_weights_may_be_cached(activations, passes, inside):
    torch.manual_seed(1)
    plain = Once()
    torch.manual_seed(1)
    model = stronghold.offload(Once(), window=2, device="cpu", activations=activations)
    assert train_cached(model, inside=inside, passes=passes) == train_cached(plain, inside=inside, passes=passes)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_those_of_another_run_are_refused():
    model = stronghold.offload(Once(), window=2, device="cpu")
    with pytest.raises(OffloadedModelError, match=r"those of layers.0, which .*cached\(\) keeps"):
        train_cached(model, inside=False, passes=2)
