"""Each mended bug with its story."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import stronghold
from stronghold.distributed.layered_model import LayeredSequential
from stronghold.window.activations import SLOTS
from tests.reference import CASES, differences, offloaded, snapshot, train


class Branches(nn.Module):
    """Every layer takes two tensors with gradients, of which the second is the larger."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 12)
        self.layers = nn.ModuleList(Adding() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        wide = self.wide(x)
        for layer in self.layers:
            x = layer(x, wide)
        return x.square().mean()


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(12, 4)
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor, wide: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(x)) * self.narrow(wide)


@pytest.mark.parametrize("activations", ["keep", "host"])
def test_layers_with_several_inputs_keep_each(activations: str) -> None:
    """``activations="host"`` brought every input up into one of two slots.

    A layer of a decoder takes three (its input, the encoder's states, a position bias), so that the third overwrote
    the first before the layer had computed with it. Now the inputs of one run come up together, in one slot.
    """

    def gradients(activations: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = stronghold.offload(Branches(), window=1, device="cpu", activations=activations)
        model(torch.randn(3, 4)).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for got, expected in zip(gradients(activations), gradients("recompute"), strict=True):
        assert torch.equal(got, expected)


def test_three_inputs_of_a_decoder_layer() -> None:
    case = CASES["t5"]
    runs = []
    for activations in ("recompute", "host"):
        model, optimizer = offloaded(case, window=2, activations=activations)
        runs.append((train(model, optimizer, case.batches(2)), snapshot(model, optimizer)))
    (expected_losses, expected), (losses, final) = runs
    assert losses == expected_losses
    assert differences(final, expected) == []


def test_outgrown_slots_are_let_go() -> None:
    """``activations="host"`` kept the device slots of every length that batches had outgrown."""
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model = stronghold.offload(layers, window=1, device="cpu", activations="host")
    keeper = model._stronghold.activations
    for length in range(1, 12):
        model(torch.randn(length, 4, requires_grad=True)).sum().backward()
    assert len(keeper._outgrown) <= 2 * SLOTS


def test_a_tied_parameter_is_checked_wherever_it_is_used() -> None:
    """The check for replaced parameters took one module per parameter, and failed on an embedding tied to the head."""
    model, optimizer = offloaded(CASES["gpt2"], window=2)
    train(model, optimizer, CASES["gpt2"].batches(1))
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(stronghold.errors.OffloadedModelError, match="replaced"):
        model(**CASES["gpt2"].batches(1)[0])


def test_a_parameter_prints_like_any_other() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    expected = [repr(parameter) for parameter in plain.parameters()]
    model = stronghold.offload(plain, window=1, device="cpu")
    assert [repr(parameter) for parameter in model.parameters()] == expected


def test_a_module_that_is_in_a_row_twice_is_computed_twice() -> None:
    """Stages were cut out of a Sequential's ``children()``, which yields a module once however often it is there.

    A row that uses one activation between all its layers lost it but for the first time, without a word.
    """
    tanh = nn.Tanh()
    model = nn.Sequential(nn.Linear(4, 4), tanh, nn.Linear(4, 4), tanh, nn.Linear(4, 4), tanh)
    row = LayeredSequential(model, nn.functional.mse_loss)
    x = torch.randn(2, 4)
    assert torch.equal(row.stage(2, 3)(row.stage(1, 2)(row.stage(0, 1)(x))), model(x))
