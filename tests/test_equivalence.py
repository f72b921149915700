"""Against ordinary PyTorch: the same loop with torch.optim.AdamW and no offloading, architecture by architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference import CASES, Case, MasterAdamW, offloaded, ordinary, snapshot, train

HUNDRED = ("gpt", "gpt2", "llama", "qwen3", "bert", "t5", "mixtral", "vit")
EACH_TIME = ("gpt-100", "t5-20", "mixtral-20", "swin-20", "resnet-20")
STEPS = [
    pytest.param(case, steps, id=f"{case}-{steps}", marks=() if f"{case}-{steps}" in EACH_TIME else pytest.mark.long)
    for case in CASES.values()
    for steps in ((100,) if case.name == "gpt" else (20, 100) if case.name in HUNDRED else (20,))
]
"""All take 20 steps and those of ``HUNDRED`` take 100, of which those of ``EACH_TIME`` are not long."""
IN_BF16 = [name for name in CASES if name not in ("swin", "resnet")]
LOOP: dict[str, Any] = {"accumulation": 2, "clip": 0.5, "warmup": 10}
"""Clips most steps' gradients, whose norms are about 1 to 3."""


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    yield
    torch.set_num_threads(before)


def distance(one: Tensor, other: Tensor) -> float:
    """Returns the norm of the difference; in float64, for second moments square to nothing in fp32."""
    return torch.dist(one.double(), other.double()).item()


@pytest.mark.parametrize(("case", "steps"), STEPS)
def test_training_is_that_of_ordinary_pytorch(case: Case, steps: int) -> None:
    """Clipping, accumulation, warm-up, decay groups and dropout are all switched on."""
    batches = case.batches(2 * steps)

    def reference(**implementation: bool) -> tuple[list[float], dict[str, dict[str, Tensor]]]:
        model, optimizer = ordinary(case, **implementation)
        return train(model, optimizer, batches, **LOOP), snapshot(model, optimizer)

    model, optimizer = offloaded(case, window=2)
    losses, got = train(model, optimizer, batches, **LOOP), snapshot(model, optimizer)
    expected_losses, expected = reference(foreach=False)

    for step, (loss, expected_loss) in enumerate(zip(losses, expected_losses, strict=True)):
        assert abs(loss - expected_loss) <= 1e-5 * abs(expected_loss), (step, loss, expected_loss)

    far = {}
    for name, tensors in expected.items():
        assert got[name].keys() == tensors.keys(), name
        for key, tensor in tensors.items():
            off = distance(got[name][key], tensor)
            if not off <= 1e-4 * tensor.double().norm().item():
                far[name, key] = off
    if not far:
        return
    # What the ordinary loop leaves to rounding (a key's bias has no gradient, and Adam divides rounding by rounding)
    # cannot be closer than its own implementations are to one another.
    runs = [expected, reference(foreach=True)[1], reference(fused=True)[1]]
    for (name, key), off in far.items():
        own = max(distance(one[name][key], other[name][key]) for one in runs for other in runs)
        assert off <= 10 * own, (name, key, off, own)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        pytest.param(name, steps, marks=() if steps == 12 and name not in ("t5", "mixtral") else pytest.mark.long)
        for name in IN_BF16
        for steps in (12, 25)
    ],
)
def test_bf16_compute_with_fp32_masters_is_exact(name: str, steps: int) -> None:
    """Every loss, weight, master and moment to the bit.

    The reference computes with bf16 parameters and updates fp32 masters in numpy, in the kernel's order of operations.
    """
    case = CASES[name]
    batches = case.batches(2 * steps)
    plain = case.model()
    reference = MasterAdamW(plain, dtype=torch.bfloat16, lr=1e-3, weight_decay=0.1)
    expected_losses, expected = train(plain, reference, batches, **LOOP), snapshot(plain, reference)
    model, optimizer = offloaded(case, window=2, dtype=torch.bfloat16)
    assert train(model, optimizer, batches, **LOOP) == expected_losses
    got = snapshot(model, optimizer)
    masters = {id(parameter): master for parameter, master in reference.pairs}
    for (name, _), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(got[name].pop("weight"), expected[name].pop("weight")), name
        expected[name]["master"] = masters[id(twin)]
        assert got[name].keys() == expected[name].keys(), name
        for key, tensor in expected[name].items():
            assert torch.equal(got[name][key], tensor), (name, key)
