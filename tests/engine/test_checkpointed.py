"""What runs again in the backward pass, beside torch.utils.checkpoint, and that a run that fails leaves no hook."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import stronghold
from stronghold.engine.checkpointed import checkpointed
from stronghold.errors import OffloadedModelError

CPU = torch.device("cpu")


class Failing(nn.Linear):
    fails = False

    def forward(self, x):
        if self.fails:
            raise MemoryError("the layer's own")
        return super().forward(x).tanh()


def test_what_is_saved_while_the_error_is_kept_is_what_it_would_have_been():
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


def test_an_error_of_the_second_run_comes_from_the_backward_pass():
    runs = []

    def compute(x):
        runs.append(len(runs))
        if len(runs) > 1:
            raise ValueError("again")
        return x.square()

    output = checkpointed(compute, torch.ones(2, requires_grad=True), device=CPU)
    for _ in range(2):
        with pytest.raises(ValueError, match="again"):
            output.sum().backward()
    assert no_hooks()


def no_hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


class Layer(nn.Module):
    """Attention and a perceptron with dropout; counts its runs, and its runs to the end."""

    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.begun = self.ended = 0

    def forward(self, x, mask):
        self.begun += 1
        x = x + self.attend(x, x, x, attn_mask=mask, need_weights=False)[0]
        x = functional.dropout(self.down(functional.gelu(self.up(self.norm(x)))), 0.5) + x
        # Saves nothing, and the default device is one that the layer looks at.
        x = x + torch.zeros(1)
        self.ended += 1
        return x, x.detach().sum()


def ours(layer, *tensors):
    return checkpointed(layer, *tensors, device=CPU)


def theirs(layer, *tensors):
    return checkpoint(layer, *tensors, use_reentrant=False)


def trained(kept, *, cast=False, outside=None):
    """Returns losses, gradients, random numbers and runs of some steps with ``kept`` around the layers."""
    torch.manual_seed(0)
    layers = [Layer() for _ in range(3)]
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer, found = torch.optim.SGD(parameters, lr=0.1), []
    mask = torch.zeros(5, 5, dtype=torch.bool)
    for _ in range(2):
        x = torch.randn(2, 5, 8, requires_grad=True)

        def whole(h):
            for layer in layers:
                h, _ = kept(layer, h, mask)
            return h

        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            h = whole(x) if outside is None else outside(whole, x)
            loss = h.float().square().mean()
        loss.backward()
        found += [loss.detach(), x.grad, *(p.grad.clone() for p in parameters), torch.rand(3)]
        optimizer.step()
        optimizer.zero_grad()
    return found, [layer.begun for layer in layers], [layer.ended for layer in layers]


def reentrant(function, x):
    return checkpoint(function, x, use_reentrant=True)


def on_the_host(function, x):
    with torch.autograd.graph.save_on_cpu():
        return function(x)


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("outside", [None, theirs, reentrant, on_the_host])
def test_it_computes_what_torch_s_checkpoint_does(outside, cast):
    expected, runs, _ = trained(theirs, cast=cast, outside=outside)
    found, own, ended = trained(ours, cast=cast, outside=outside)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert own == runs
    if outside is None:
        assert own == [4, 4, 4]
        assert ended == [2, 2, 2], "a second run ends with what was saved last"
    assert no_hooks()


def test_a_checkpoint_inside_of_it():
    def kept(layer, h, mask):
        return ours(lambda h: (theirs(layer, h, mask)[0].tanh(), None), h)

    def as_theirs(layer, h, mask):
        return theirs(lambda h: (theirs(layer, h, mask)[0].tanh(), None), h)

    for one, other in zip(trained(kept)[0], trained(as_theirs)[0], strict=True):
        assert torch.equal(one, other)


def test_the_default_device_is_that_of_the_first_run():
    seen = []

    def compute(x):
        seen.append(torch.get_default_device())
        return x.square()

    x = torch.ones(2, requires_grad=True)
    with torch.device("meta"):
        output = checkpointed(compute, x, device=CPU)
    output.sum().backward()
    assert seen == [torch.device("meta")] * 2
    assert torch.get_default_device() == CPU


def test_a_graph_that_is_kept_runs_once_for_each_pass_through_it():
    runs = []

    def compute(x):
        runs.append(1)
        return x.exp() * x.sin()

    x = torch.linspace(0, 1, 3, requires_grad=True)
    output = checkpointed(compute, x, device=CPU)
    (first,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, (x.exp() * (x.sin() + x.cos())).detach())
    assert len(runs) == 3
    with pytest.raises(RuntimeError, match="a second time"):
        output.sum().backward()


def test_each_backward_pass_has_a_run_of_its_own():
    """What a pass has left unused lies in a slot that is another layer's by the next one."""
    runs = []

    def compute(x):
        runs.append(1)
        return x.exp(), x.cosh()

    x = torch.linspace(0, 1, 3, requires_grad=True)
    one, other = checkpointed(compute, x, device=CPU)
    torch.autograd.grad(one.sum(), x, retain_graph=True)
    (found,) = torch.autograd.grad(other.sum(), x)
    assert len(runs) == 3
    torch.testing.assert_close(found, x.detach().sinh())


def test_what_is_used_is_let_go_and_what_was_saved_is_not_held():
    first: list = []
    held: list = []

    class Held(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            saved = x.clone()
            first.append(StorageWeakRef(saved.untyped_storage()))
            ctx.save_for_backward(saved)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            (saved,) = ctx.saved_tensors
            counts.append(sum(not reference.expired() for reference in held))
            held.append(StorageWeakRef(saved.untyped_storage()))
            return gradient

    def compute(x):
        for _ in range(4):
            x = Held.apply(x)
        return x

    counts: list = []
    output = checkpointed(compute, torch.ones(1000, requires_grad=True), device=CPU)
    assert [reference.expired() for reference in first] == [True] * 4
    output.sum().backward(retain_graph=True)
    assert counts == [0, 0, 0, 0]
    assert all(reference.expired() for reference in held)


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (lambda x: x[:1].exp(), r"must save what it saved .*number 0 in layers\.3, torch\.float32 of shape \(1,\)"),
        (lambda x: x.double().exp(), r"torch\.float64 of shape \(2,\) on cpu for torch\.float32"),
        (lambda x: x + 1, r"got 0 tensors of 1 in layers\.3"),
    ],
)
def test_a_second_run_that_computes_something_else_is_refused(second, told):
    ways = [torch.exp, second]
    x = torch.ones(2, requires_grad=True)
    output = checkpointed(lambda x: ways.pop(0)(x), x, device=CPU, layer="layers.3")
    with pytest.raises(OffloadedModelError, match=told):
        output.sum().backward()
    assert x.grad is None
    assert no_hooks()


def test_what_is_written_before_it_is_used_is_refused():
    def compute(x):
        y = x.exp()  # saves its result
        z = y * 2
        y.add_(1)
        return z.sin() + y

    output = checkpointed(compute, torch.ones(2, requires_grad=True), device=CPU, layer="layers.3")
    with pytest.raises(RuntimeError, match=r"saved in layers\.3 must be the same"):
        output.sum().backward()
    x = torch.ones(2, requires_grad=True)
    given = x * 1
    output = checkpointed(torch.exp, given, device=CPU, layer="layers.3")
    given.add_(1)
    with pytest.raises(RuntimeError, match=r"saved in layers\.3 must be the same .*own input needs .*='keep'"):
        output.sum().backward()


@pytest.mark.parametrize("caught", [Exception, BaseException])
def test_a_layer_that_goes_on_after_errors_ends_as_well(caught):
    runs = []

    def compute(x):
        runs.append(1)
        try:
            x = x.exp()
        except caught:
            runs.append("another way")
            x = x.exp()
        return x

    x = torch.ones(2, requires_grad=True)
    checkpointed(compute, x, device=CPU).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp())
    assert runs == ([1, 1] if caught is Exception else [1, 1, "another way"])


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
