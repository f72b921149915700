"""Replicas with unequal batches: noticed with their numbers, once, and equal ones are not."""

from __future__ import annotations

import warnings

import pytest
import torch

import stronghold
from stronghold.engine import engine_of, offload_shared
from tests.replicas import in_threads
from tests.test_ordering import Model


def train(sizes, *, steps=1, **settings):
    """Returns the warnings of a training in which replica i has batches of ``sizes[i]`` samples."""

    def one(replicas):
        model = offload_shared(models[replicas.local_rank], replicas, device="cpu", window=1, **settings)
        copies = model.parameters() if replicas.local_rank else ()
        everyone = replicas.everyone
        engine_of(model).join(everyone, shared={}, copies=copies, model="Model", passes=1, here=everyone.world_size)
        optimizer = stronghold.AdamW(model.parameters(), threads=1)
        for _ in range(steps):
            with torch.no_grad():
                model(torch.ones(3 + replicas.local_rank, 8))  # an evaluation is each one's own
            model(torch.ones(sizes[replicas.local_rank], 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    models = [Model() for _ in sizes]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        in_threads(len(sizes), one)
    return [str(warning.message) for warning in caught if issubclass(warning.category, RuntimeWarning)]


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("sizes", [(6, 2), (2, 6)])
def test_unequal_batches_are_told_once_with_their_numbers(sizes, activations):
    (told,) = train(sizes, steps=2, activations=activations)
    assert "(got 2 to 6 samples in one backward pass" in told
    assert "drop_last=True" in told


def test_equal_batches_are_not():
    assert train((4, 4)) == []
    assert train((4, 4), micro_batch=3) == []


def test_alone_there_is_nothing_to_compare():
    model = stronghold.offload(Model(), device="cpu", window=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(4, 8)).sum().backward()
