"""A mixture of experts in parts on a device with memory of its own: a part of a layer in each slot."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import stronghold
from tests.crossed import crossed
from tests.gpu import DEVICE, SOFT, needs_device

pytestmark = [pytest.mark.gpu, needs_device]

HIDDEN, EXPERTS = 32, 6


class Experts(nn.Module):
    """Stacked, and called as those of transformers."""

    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(0.1 * torch.randn(EXPERTS, 2 * HIDDEN, HIDDEN))
        self.down = nn.Parameter(0.1 * torch.randn(EXPERTS, HIDDEN, 2 * HIDDEN))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        total = torch.zeros_like(hidden_states)
        chosen = functional.one_hot(top_k_index, self.num_experts).permute(2, 1, 0)
        for expert in chosen.sum(dim=(-1, -2)).nonzero().flatten().tolist():
            choice, token = torch.where(chosen[expert])
            output = functional.linear(hidden_states[token], self.up[expert]).relu()
            output = functional.linear(output, self.down[expert]) * top_k_weights[token, choice, None]
            total.index_add_(0, token, output.to(total.dtype))
        return total


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = Experts()

    def forward(self, x):
        x = x + self.mix(self.norm(x))
        weights, index = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, index, weights)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


@pytest.mark.parametrize(("dtype", "frozen"), crossed([torch.float32, torch.bfloat16], [False, True], together=1))
def test_parts_of_experts_learn_what_the_whole_learns(frozen, dtype):
    """To the bit in every window, with another optimizer's steps and with ours, and on a CPU to the whole's bits.

    A GPU that updates parameters rounds otherwise than the host does. Of a plain model it updates all; beside parts,
    norms and routers are root parameters, which PyTorch's optimizer steps there, where it steps whole layers on the
    host.
    """
    torch.manual_seed(0)
    first = Mixture().to(dtype)
    if frozen:
        for layer in first.layers:
            layer.experts.requires_grad_(False)

    def losses(model, optimizer):
        generator, found = torch.Generator().manual_seed(1), []
        for _ in range(4):
            loss = model(torch.randn(3, HIDDEN, generator=generator).to(DEVICE, dtype))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    def trained(model):
        return [p for p in model.parameters() if p.requires_grad]

    def by_torch(model):
        return losses(model, torch.optim.AdamW(trained(model), lr=1e-2, foreach=False))

    plain = by_torch(copy.deepcopy(first).to(DEVICE))
    expected = by_torch(stronghold.offload(copy.deepcopy(first), device=DEVICE, window=3))
    near = 1e-5 if dtype == torch.float32 else 2e-2
    assert expected == pytest.approx(plain, rel=near)
    ours, theirs = [], []
    for way in ({"window": 1}, {"window": 2, "activations": "keep"}, {"window": 3, "activations": "host"}):
        model = stronghold.offload(stronghold.split_experts(copy.deepcopy(first), 2), device=DEVICE, **way)
        theirs.append(by_torch(model))
        model = stronghold.offload(stronghold.split_experts(copy.deepcopy(first), 1), device=DEVICE, **way)
        ours.append(losses(model, stronghold.AdamW(trained(model), lr=1e-2)))
        assert (stronghold.report(model).step.spared_fetches > 0) == frozen
    assert all(one == ours[0] for one in ours)
    assert all(one == theirs[0] for one in theirs)
    assert theirs[0] == (pytest.approx(expected, rel=near) if SOFT is None else expected)


def test_parts_are_compared_with_the_whole_under_a_reentrant_checkpoint():
    """In the backward pass, where the first gradients are, a comparison waited for autograd's thread, which it was in.

    The second time a flag has changed since the forward pass, and it is done in that thread.
    """

    class Within(Experts):
        pass

    torch.manual_seed(0)
    whole = Mixture()
    for layer in whole.layers:
        layer.experts.__class__ = Within
    parts = stronghold.split_experts(copy.deepcopy(whole), 2)
    x = torch.randn(3, HIDDEN)

    def gradients(model, training):
        given = x.to(DEVICE).requires_grad_()
        loss = checkpoint(model, given, use_reentrant=True)
        model.train(training)
        loss.backward()
        return given.grad

    whole.to(DEVICE)
    parts.to(DEVICE)
    for training in (True, False):
        assert torch.equal(gradients(parts, training), gradients(whole, training))
