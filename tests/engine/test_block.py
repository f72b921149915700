"""What a layer's run leaves behind in autograd's graph: it goes with the graph, and nobody may write it."""

import gc
import weakref

import pytest
from torch import Tensor, nn

from tests.crossed import crossed
from tests.small import Residual, numbers, pair

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
