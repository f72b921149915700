"""What autograd does where a layer's parameters lie on the host between its passes: it makes new accumulators."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import stronghold
from stronghold.engine import engine_of
from tests.crossed import crossed
from tests.gpu import SOFT, needs_device
from tests.test_ordering import Layer

pytestmark = [
    pytest.mark.gpu,
    needs_device,
    pytest.mark.skipif(SOFT is None, reason="compares with the host's bits"),
    pytest.mark.usefixtures("root_on_the_host"),
]


class Twice(nn.Module):
    """Its layers are used in two rounds, so that a backward pass brings each parameter two gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(8, 12), nn.Linear(12, 3)
        self.layers = nn.ModuleList(Layer(12) for _ in range(3))

    def forward(self, x):
        x = self.into(x)
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return self.out(x)


def train(device: str, *, hooks: bool = False, update: str = "deferred", **settings):
    """Returns losses, what hooks see and the parameters at the end."""
    torch.set_num_threads(1)
    model, seen = Twice(), []
    stronghold.offload(model, device=device, **settings)
    optimizer = stronghold.AdamW(model.parameters(), lr=0.01, update=update, threads=1)
    for name, parameter in model.named_parameters() if hooks else ():

        def note(p: nn.Parameter, name: str = name) -> None:
            if p.grad is not None:  # of what in_backward has consumed there is none
                seen.append((name, p.grad.detach().float().cpu().sum().item()))

        parameter.register_post_accumulate_grad_hook(note)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(6, 8, generator=generator).to(device, settings.get("dtype"))
        loss = model(x).square().mean()
        loss.backward()
        seen.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return seen, [parameter.detach().cpu().clone() for parameter in model.parameters()]


SETTINGS = crossed(
    ["recompute", "keep", "host"], ["deferred", "in_backward"], [None, torch.bfloat16], [1, 2], [False, True]
)


@pytest.mark.parametrize(("activations", "update", "dtype", "window", "hooks"), SETTINGS)
def test_a_layer_that_is_used_twice_trains_as_on_the_host(activations, update, dtype, window, hooks):
    settings = {"activations": activations, "update": update, "dtype": dtype, "window": window}
    expected, parameters = train("cpu", hooks=hooks, **settings)
    with SOFT.checked() as races:
        seen, others = train("soft", hooks=hooks, **settings)
    assert races == []
    assert sorted(map(str, seen)) == sorted(map(str, expected))  # hooks of a layer come in an order of autograd's
    assert all(map(torch.equal, parameters, others))


@pytest.mark.parametrize("activations", ["recompute", "keep", "host"])
def test_a_model_goes_while_its_layers_are_on_their_way(activations):
    """What a copy still uses must not be freed under it."""
    for _ in range(3):
        model = stronghold.offload(Twice(), device="soft", window=1, activations=activations)
        optimizer = stronghold.AdamW(model.parameters())
        model(torch.randn(6, 8, device="soft")).sum().backward()
        fetches = engine_of(model).device.fetches.of_torch
        SOFT.slow(fetches, 30_000)
        with SOFT.checked() as races:
            optimizer.step()
            del model, optimizer
            gc.collect()
            new = [torch.full((2**10,), 7.0, device="soft") for _ in range(64)]
            torch.accelerator.synchronize()
            assert all(bool((one == 7.0).all()) for one in new)
        SOFT.slow(fetches, 0)  # another model will have it
        assert races == []
