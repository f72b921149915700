"""What a layer's run leaves behind in autograd's graph: it goes with the graph, and nobody may write it."""

import copy
import functools
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from stronghold.errors import OffloadedModelError
from tests.crossed import crossed
from tests.small import Block, Residual, assert_close, numbers, pair

ACTIVATIONS = ("keep", "recompute", "host")


class Outputs(nn.Module):
    """Operations that save their own outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh().sigmoid().softmax(-1).exp()


class WritesOutput(nn.Module):
    """Writes what the backward pass needs, which autograd refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).exp()
        z = y * y
        y.add_(1)
        return z.tanh() + y


@pytest.mark.parametrize(("raises", "activations"), crossed([True, False], ACTIVATIONS, together=1))
def test_a_forward_pass_that_no_backward_follows_leaves_nothing(activations, raises):
    model = pair(lambda: Residual(block=Outputs), activations=activations)[1]
    outputs = []
    hooks = [
        module.register_forward_hook(lambda module, args, output: outputs.append(weakref.ref(output)))
        for module in (*model.layers, *(layer.linear for layer in model.layers))
    ]
    if raises:
        hooks.append(model.layers[3].linear.register_forward_hook(lambda *_: 1 / 0))
    for batch in numbers(10):
        try:
            model(batch)
        except ZeroDivisionError:
            assert raises
    for hook in hooks:
        hook.remove()
    gc.collect()
    assert len(outputs) >= 70 and not [output for output in outputs if output() is not None]


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_what_is_saved_and_written_is_refused_as_autograd_refuses_it(activations, micro_batch):
    plain, model = pair(lambda: Residual(block=WritesOutput), activations=activations, micro_batch=micro_batch)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain(numbers(1)[0]).backward()
    with pytest.raises(RuntimeError, match=r"layers.3 must be the same in the backward pass .* in-place"):
        model(numbers(1)[0]).backward()


class Doubling(Block):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def minus_its_input(layer: Block, x: Tensor, own=Block.forward) -> Tensor:
    return own(layer, x) - x


@pytest.mark.parametrize("window", ["auto", 1])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_layer_computes_by_the_forward_that_its_class_has_now(activations, window, monkeypatch):
    """As kernels that are patched into a model's classes do, or a layer that is made one of a derived class."""

    def loop(model: nn.Module) -> list[Tensor]:
        seen = []
        for step, batch in enumerate(numbers(3)):
            if step == 1:
                model.layers[1].__class__ = Doubling
            with monkeypatch.context() as patched:
                if step == 2:
                    patched.setattr(Block, "forward", minus_its_input)
                loss = model(batch)
                loss.backward()
            seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        return seen

    expected, got = map(
        loop, pair(lambda: Residual(3, lambda: Block(dropout=0.0)), window=window, activations=activations)
    )
    assert_close(got, expected)


@pytest.mark.parametrize("activations", ["keep", "recompute", "host"])
def test_the_second_run_has_the_forward_of_the_first(activations, monkeypatch):
    """Also where another pass came in between, as of a reference model that is the same with a patch."""

    def loop(model: nn.Module) -> list[Tensor]:
        first, second = numbers(2)
        with monkeypatch.context() as patched:
            patched.setattr(Block, "forward", minus_its_input)
            loss = model(first)
        with torch.no_grad():
            model(second)
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    build = functools.partial(Residual, 3, functools.partial(Block, dropout=0.0))
    expected, got = map(loop, pair(build, window=1, activations=activations))
    assert_close(got, expected)


def test_a_compiled_layer_s_class_keeps_its_forward(monkeypatch):
    _, model = pair(lambda: Residual(2, lambda: Block(dropout=0.0)), compile=True)
    monkeypatch.setattr(Block, "forward", lambda self, x: x)
    with pytest.raises(OffloadedModelError, match="compiled layer keeps the forward"):
        model(numbers(1)[0])


@pytest.mark.parametrize("grad", [True, False])
def test_a_trace_of_layers_that_move_is_refused_and_one_of_a_copy_computes_the_same(grad):
    plain, model = (each.eval() for each in pair(lambda: Residual(block=Outputs)))
    batch, other = numbers(2)
    with torch.set_grad_enabled(grad):
        with pytest.raises(OffloadedModelError, match=r"cannot be recorded by torch.jit.trace.* layers.0 .*deepcopy"):
            torch.jit.trace(model, batch)
        traced = torch.jit.trace(copy.deepcopy(model), batch)
    assert torch.equal(traced(other), plain(other))
    assert torch.equal(model(other), plain(other))
