"""What passes over many micro-batches take, of which a few are run, beside all of them run."""

import pytest
import torch
from torch import Tensor, nn

from stronghold.engine.planning.computation import ModelComputation
from stronghold.lab.models.gpt import GPT, GPTConfig
from tests.crossed import crossed


class Row(nn.Module):
    """A row of layers of one kind, between two products."""

    def __init__(self, layer: type[nn.Module], width: int = 24) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.bias = nn.Parameter(torch.zeros(1, 7, width))
        self.layers = nn.ModuleList(layer(width) for _ in range(3))
        self.last = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, self.bias)
        return self.last(x).square().mean()


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class SavesOutput(nn.Module):
    """The last function's backward pass needs its result."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Biased(nn.Module):
    """Every micro-batch adds to the gradient of an input that is not cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.linear(x + bias) * x


class Frozen(Residual):
    """Autograd does not keep the input of the first product."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm.requires_grad_(False)
        self.up.requires_grad_(False)


class Wide(nn.Module):
    """What it computes in between is much smaller than its input: the most is alive at the end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return x * self.scale


KINDS = {"residual": Residual, "output": SavesOutput, "biased": Biased, "frozen": Frozen, "wide": Wide}


@pytest.mark.parametrize(
    ("kind", "kept", "products"),
    crossed([*KINDS], [False, True], [(torch.float32, 1), (torch.bfloat16, 512)], together=1),
)
def test_a_few_micro_batches_tell_of_all(kind, kept, products):
    dtype, block_bytes = products
    model, x = Row(KINDS[kind]).to(dtype), torch.randn(13, 7, 8, dtype=dtype)
    found = ModelComputation(model, [*model.layers], (x,), block_bytes=block_bytes, fused=block_bytes > 1)
    for samples in (1, 2, 3, 13, None):
        for layer in (0, 2):
            told = found.passes(layer, samples, kept=kept)
            assert told == found.passes(layer, samples, kept=kept, whole=True), (samples, layer)
            assert told.backward_bytes > 0


@pytest.mark.parametrize("kept", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_few_micro_batches_tell_of_all_of_a_transformer(kept):
    model = GPT(GPTConfig(layers=2, hidden=32, heads=4, sequence=16, vocabulary=50, dropout=0.1))
    ids = torch.zeros(13, 16, dtype=torch.int64)
    inputs = {"input_ids": ids, "labels": ids}
    found = ModelComputation(model, [*model.layers], inputs, block_bytes=512, fused=True)
    for samples in (1, 2, 5):
        for layer in range(2):
            told = found.passes(layer, samples, kept=kept)
            assert told == found.passes(layer, samples, kept=kept, whole=True), (samples, layer)


def test_micro_batches_in_between_are_not_run():
    calls = []

    class Counted(Wide):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            calls.append(x.shape[0])
            return super().forward(x, bias)

    model = Row(Counted)
    found = ModelComputation(model, [*model.layers], (torch.randn(64, 7, 8),))
    calls.clear()
    found.passes(1, 1, kept=True)
    assert calls == [1] * 6
