"""Inputs of another dtype than the model computes in are told of with the rule and the remedy."""

import pytest
import torch
from torch import nn

from stronghold.errors import OffloadedModelError
from tests.small import Chain, Residual, numbers, pair

MESSAGE = (
    r"what is computed with {} must have its dtype, torch.bfloat16 \(got torch.float32; torch: .*\); cast the batch "
    r"\(batch.to\(torch.bfloat16\)\), run the model under torch.autocast, .* or convert the buffers, "
)


class Row(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize(
    ("build", "name"),
    [
        (Residual, "into.weight"),
        (Chain, "net.0"),
        (lambda: Row(lambda: nn.Conv1d(6, 6, 1)), "layers.0"),
        (lambda: Row(lambda: nn.LayerNorm(16)), "layers.0"),
    ],
    ids=["root", "linear", "conv", "norm"],
)
def test_an_input_in_fp32_to_a_model_in_bf16(build, name, gradients):
    _, model = pair(build, dtype=torch.bfloat16, layers="net" if build is Chain else "layers")
    batch = numbers(1)[0]
    with torch.set_grad_enabled(gradients), pytest.raises(OffloadedModelError, match=MESSAGE.format(name)) as refusal:
        model(batch)
    assert type(refusal.value.__cause__) is RuntimeError
    assert model(batch.to(torch.bfloat16)).isfinite().all()
    if not isinstance(model.get_submodule(name.removesuffix(".weight")), nn.LayerNorm):  # which autocast leaves alone
        with torch.autocast("cpu", torch.bfloat16):
            assert model(batch).isfinite().all()


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(self.up(x))


@pytest.mark.parametrize("autocast", [False, True])
def test_buffers_that_keep_their_dtype_are_told_of_and_converted_before_offload_they_train(autocast):
    batch = torch.randn(4, 6).to(torch.bfloat16)
    _, model = pair(lambda: Row(Normed), dtype=torch.bfloat16)
    message = (
        r"must have its dtype, torch.bfloat16 \(got torch.float32 in its buffers; torch: .*\); convert the buffers, "
        r"which dtype= leaves as they are \(model.to\(torch.bfloat16\) before offload"
    )
    refused = pytest.raises(OffloadedModelError, match=message)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), refused as refusal:
        model(batch)
    assert type(refusal.value.__cause__) is RuntimeError

    plain, model = pair(lambda: Row(Normed).to(torch.bfloat16))
    for one in (plain, model):
        one(batch).square().mean().backward()
    for (name, p), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, other.grad), name
    for (name, buffer), other in zip(plain.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(buffer, other), name


def test_other_errors_stay_what_they_are():
    _, model = pair(Residual, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as refusal:
        model(torch.zeros(1, 1, 3, dtype=torch.bfloat16))
    assert type(refusal.value) is RuntimeError

    class Failing(nn.Linear):
        def forward(self, x):
            raise RuntimeError("a dtype of one's own")

    _, model = pair(lambda: Row(lambda: Failing(16, 16)), dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="a dtype of one's own") as refusal:
        model(numbers(1)[0].to(torch.bfloat16))
    assert type(refusal.value) is RuntimeError
