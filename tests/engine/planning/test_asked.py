"""Micro-batches are chosen where nobody set them, and only where every number stays plain PyTorch's."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import stronghold
from stronghold.engine.planning.asked import micro_batches
from stronghold.engine.planning.searched import PlannedModel
from stronghold.errors import BudgetError
from tests.planner.machines import laptop, machine

LENGTH, BATCH, WIDTH = 64, 32, 16


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """A laptop that was probed; what is put into ``kept`` is another machine."""
    kept = [laptop()]
    monkeypatch.setattr("stronghold.engine.planning.auto.kept_machine", lambda device: kept[-1])
    monkeypatch.setattr("stronghold.engine.planning.asked.process_bytes", lambda model: 300 * 2**20)
    return kept


class OfTorch(nn.Module):
    """The attention of OpenAI's CLIP, over (sequence, batch, width)."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class OfItsOwn(nn.Module):
    """Attention over (sequence, batch, width) of which no module's setting tells."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).transpose(0, 1).unsqueeze(1).chunk(3, dim=-1)
        return x + self.out(scaled_dot_product_attention(q, k, v).squeeze(1).transpose(0, 1))


class BatchFirst(OfItsOwn):
    def forward(self, x):
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class Vision(nn.Module):
    """Takes (batch, sequence, width), and its layers what ``turned`` makes of that."""

    def __init__(self, block, turned=True):
        super().__init__()
        torch.manual_seed(0)
        self.turned = turned
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(3))

    def forward(self, x):
        x, total = self.inner(x), 0.0
        x = x.transpose(0, 1) if self.turned else x
        for layer in self.layers:
            x = layer(x)
            if isinstance(x, tuple):
                x, more = x
                total = total + more
            total = total + getattr(layer, "loss", 0.0)
        return x.square().mean() + total


class Mixture(nn.Module):
    """Returns an auxiliary loss over the whole batch, or leaves it in an attribute."""

    def __init__(self, returned=True):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.router, self.returned = nn.Linear(WIDTH, 4), returned

    def forward(self, x):
        y = self.norm(x)
        loss = self.router(x).softmax(-1).mean((0, 1)).square().sum()
        x = x + self.attention(y, y, y, need_weights=False)[0]
        if self.returned:
            return x, loss
        self.loss = loss
        return x


def batch(samples=BATCH, length=LENGTH, seed=1):
    return torch.randn(samples, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def trained(model, optimizer, x, steps=3):
    losses = []
    for _ in range(steps):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_trains_as_plain(build, x, **settings):
    plain, model = build(), stronghold.offload(build(), **{"device": "cpu", "inputs": x} | settings)
    optimizers = torch.optim.AdamW(plain.parameters(), lr=0.01), stronghold.AdamW(model.parameters(), lr=0.01)
    for each in (plain, model):
        each(x).backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)
    expected, found = (trained(each, optimizer, x) for each, optimizer in zip((plain, model), optimizers, strict=True))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def choices(model, x):
    inputs = x if isinstance(x, tuple) else (x,)
    planned = PlannedModel(
        model,
        machine(),
        inputs,
        layers="layers",
        dtype=None,
        directories=[],
        loss=lambda out: out if out.ndim == 0 else out.mean(),
    )
    return micro_batches("auto", planned)


@pytest.mark.parametrize("block", [OfTorch, OfItsOwn])
@pytest.mark.parametrize("length", [LENGTH, BATCH], ids=["longer", "as long as the batch"])
def test_a_sequence_is_never_cut_in_the_batchs_stead(block, length):
    """It was: CLIP's first loss over 32 samples of 64 tokens was 0.57862, where plain PyTorch's is 0.57051."""
    assert_trains_as_plain(lambda: Vision(block), batch(length=length))


class Beside(Vision):
    """Takes (sequence, batch, width), and a target for each sample."""

    def forward(self, x, target):
        return super().forward(x.transpose(0, 1)) + target.mean()


def test_only_what_is_surely_the_batch_is_cut():
    assert choices(Vision(BatchFirst, turned=False), batch()) == (None, 16, 8, 4, 2, 1)
    assert choices(Vision(OfItsOwn), batch()) == (None,)
    assert choices(Vision(BatchFirst, turned=False), batch(samples=WIDTH)) == (None,), "the width is as much"
    assert choices(Beside(OfItsOwn), (batch(), torch.zeros(LENGTH))) == (None,), "the target has another batch"
    one_for_all = (batch(), torch.zeros(1, LENGTH))
    beside = Beside(BatchFirst, turned=True)
    assert choices(beside, one_for_all) == (None, 16, 8, 4, 2, 1), "what broadcasts tells nothing"


@pytest.mark.parametrize("returned", [True, False], ids=["returned", "left in an attribute"])
def test_a_layer_with_a_loss_over_the_batch_is_planned_with_the_whole_one(returned):
    """It ended in an error that told to leave out a micro_batch that nobody had passed."""
    settings = {"window": 2, "resident": 0, "activations": "recompute"}
    assert_trains_as_plain(lambda: Vision(lambda: Mixture(returned), turned=False), batch(), **settings)


@pytest.mark.parametrize(
    ("returned", "refusal"),
    [(True, "a layer's outputs together .*shape \\(\\)"), (False, "what a layer computes together .*attribute loss")],
)
def test_the_budget_of_such_a_layer_is_told_in_numbers_and_a_micro_batch_is_refused(returned, refusal):
    model, inputs = Vision(lambda: Mixture(returned), turned=False), batch(64, 128)
    with pytest.raises(BudgetError, match=r"memory must hold at least .* \(got 6\.00 MiB\), with .*micro_batch=None"):
        stronghold.plan(model, machine=machine(), inputs=inputs, micro_batch="auto", device_memory="6MiB")
    with pytest.raises(ValueError, match=f"^micro_batch must be able to put {refusal}"):
        stronghold.plan(model, machine=machine(), inputs=inputs, micro_batch=2)


class Paired(Vision):
    """Gives its layers a tensor for each sample and head in one dimension, as BLOOM's alibi is."""

    def forward(self, x):
        heads = torch.ones(2 * len(x), 1, 1)
        for layer in self.layers:
            x = layer(x, heads)
        return x.square().mean()


class Weighted(nn.Module):
    """A layer that takes the batch from what it is given beside its input, too."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, heads):
        return x + self.inner(x) * heads.view(len(x), 2, 1).mean(1, keepdim=True)


def test_a_layer_that_a_micro_batch_is_too_short_for_is_planned_with_the_whole_one():
    """It ended in an error of the layer's own, of BLOOM: 'Target sizes: [8, 32, 32]. Tensor sizes: [16, 1, 32]'."""
    model = Paired(Weighted, turned=False)
    plan = stronghold.plan(model, machine=machine(), inputs=batch(), micro_batch="auto")
    assert plan.settings.get("micro_batch") is None
    with pytest.raises(ValueError, match=r"^micro_batch needs the batch as first .*Weighted, over 2 of 32 samples: .*"):
        stronghold.plan(model, machine=machine(), inputs=batch(), micro_batch=2)
