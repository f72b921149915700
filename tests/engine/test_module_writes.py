"""What layers write into their own modules over micro-batches."""

from collections import deque

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.small import SIZE, Residual, assert_close, assert_same_models, numbers, pair


class Router(nn.Module):
    """Keeps an auxiliary loss of its samples in ``kept``, by ``keep``, as classes of experts of users do."""

    def __init__(self, kept, keep):
        super().__init__()
        self.linear, self.kept, self.keep = nn.Linear(SIZE, SIZE), kept, keep

    def forward(self, x: Tensor) -> Tensor:
        weights = self.linear(x).softmax(-1)
        self.keep(self, weights.mean((0, 1)).square().sum())
        return x * weights


class Layer(nn.Module):
    def __init__(self, kept, keep):
        super().__init__()
        self.router = Router(kept, keep)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.router(x)


class Routed(nn.Module):
    def __init__(self, make, keep, read):
        super().__init__()
        self.layers, self.read = nn.ModuleList(Layer(make(), keep) for _ in range(2)), read

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() + sum(self.read(layer.router.kept) for layer in self.layers)


def assign(router, loss):
    router.kept = loss


WAYS = {
    "attribute": (lambda: None, assign, lambda kept: kept),
    "list": (list, lambda router, loss: router.kept.append(loss), lambda kept: kept.pop()),
    "dict": (lambda: {"a": ([],)}, lambda router, loss: router.kept["a"][0].append(loss), lambda k: k["a"][0].pop()),
    "deque": (lambda: deque(maxlen=1), lambda router, loss: router.kept.append(loss), lambda kept: kept[0]),
    "sum": (lambda: None, lambda r, loss: assign(r, loss if r.kept is None else r.kept + loss), lambda kept: kept),
    "in_place": (lambda: torch.zeros(()), lambda router, loss: router.kept.add_(loss), lambda kept: kept),
}


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("way", WAYS)
def test_a_loss_that_is_left_in_an_attribute_is_refused_and_not_lost(way, activations):
    (x,) = numbers(1)
    model = pair(lambda: Routed(*WAYS[way]), micro_batch=2, activations=activations)[1]
    told = r"layers\.0, which writes a tensor of shape \(\) .* attribute kept of its Router, once .*; return it, or off"
    with pytest.raises(ValueError, match=told):
        model(x)
    plain, model = pair(lambda: Routed(*WAYS[way]), micro_batch=4, activations=activations)
    assert_close(model(x), plain(x))


def test_the_loss_of_a_step_before_is_none_of_the_next():
    """An attribute that holds a graph already is written anew, too; one that is left as it is, is no matter."""
    first, second = numbers(2)
    model = pair(lambda: Routed(*WAYS["attribute"]), micro_batch=2, activations="keep")[1]
    model(first[:2]).backward()
    with pytest.raises(ValueError, match="attribute kept of its Router"):
        model(second)
    kept = torch.zeros((), requires_grad=True)
    model = pair(lambda: Routed(lambda: [kept], lambda router, loss: None, lambda _: 0.0), micro_batch=2)[1]
    assert model(second).isfinite()


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_values_without_a_graph_may_be_recorded(activations):
    def keep(router, loss):
        router.kept.append(loss.detach())

    plain, model = pair(lambda: Routed(list, keep, lambda _: 0.0), micro_batch=2, activations=activations, window=1)
    for batch in numbers(2):
        losses = [one(batch) for one in (model, plain)]
        assert_close(*losses)
        for loss in losses:
            loss.backward()
    assert_same_models(model, plain)


class Normed(Layer):
    """Its weight is computed of two others before each run, and left in an attribute with its graph."""

    def __init__(self):
        super().__init__(None, lambda router, loss: None)
        nn.utils.weight_norm(self.router.linear)
        prune.l1_unstructured(self.router.linear, "bias", 0.5)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weights_that_are_computed_before_each_run_are_no_loss():
    plain, model = pair(lambda: Residual(block=Normed), micro_batch=2, activations="keep")
    (x,) = numbers(1)
    outputs = [one(x) for one in (model, plain)]
    assert_close(*outputs)
    for output in outputs:
        output.square().mean().backward()
    assert_same_models(model, plain)
