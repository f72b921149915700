"""Selective checkpoints of the user's own around offloaded layers, and other modes that see each operation."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import stronghold
from tests.small import Residual, assert_same_models, numbers, pair

aten = torch.ops.aten
PRODUCTS = [aten.addmm.default, aten.mm.default]
PLACES = [{}, {"window": 1}, {"window": 2, "store": "disk"}, {"resident": 2, "window": 1}, {"micro_batch": 4}]


def of_the_engine(context, operation, *args, **kwargs):
    """Keeps what the engine does around a layer: results of its own that it would be given a second time."""
    kept = operation in (aten.index_select.default, aten.lift_fresh.default, aten._to_copy.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(Residual):
    policy = PRODUCTS

    def features(self, x):
        kept = partial(create_selective_checkpoint_contexts, type(self).policy)
        x = self.into(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=kept)
        return self.out(x)


class OfTheEngine(Selective):
    policy = of_the_engine


def losses_of(model: nn.Module) -> list[float]:
    """Two backward passes for each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(7)
    losses = []
    for number, batch in enumerate(numbers(6)):
        loss = model(batch)
        loss.backward()
        losses.append(loss.item())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("build", [Selective, OfTheEngine])
@pytest.mark.parametrize("settings", PLACES, ids=str)
def test_selective_checkpoints_around_layers_compute_what_they_compute_in_memory(build, settings, tmp_path):
    """What the engine copied and counted between layers was missing, or in the way, in the second run."""
    settings = {**settings, **({"store": str(tmp_path)} if "store" in settings else {})}
    plain, ours = pair(build, **settings)
    assert losses_of(ours) == losses_of(plain)
    assert_same_models(ours, plain, rtol=0, atol=0)


def test_results_that_are_kept_in_a_window_are_refused_by_name():
    class All(Selective):
        policy = staticmethod(lambda *_, **__: CheckpointPolicy.MUST_SAVE)

    _, ours = pair(All, window=1)
    with pytest.raises(stronghold.errors.OffloadedModelError, match="nothing may keep a tensor over the weights of"):
        losses_of(ours)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_same_of_each_pass():
    _, ours = pair(Residual, window=1)
    ours.eval()
    seen = []
    with torch.no_grad():
        for batch in numbers(3):
            with Seen() as mode:
                ours(batch)
            seen.append(mode.operations)
    assert seen[0] == seen[1] == seen[2]
