"""A loop with accelerate's Accelerator trains an offloaded model as it trains any other."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

from stronghold.errors import OffloadedModelError
from tests.reference import CASES, differences, offloaded, ordinary, snapshot

CASE = CASES["llama"]


def loader() -> torch.utils.data.DataLoader:
    samples = [{key: value[0] for key, value in batch.items()} for batch in CASE.batches(24, size=1)]
    return torch.utils.data.DataLoader(samples, batch_size=2)  # type: ignore[arg-type]


def trained(
    model: nn.Module, optimizer: Any, *, accumulation: int = 1, clip: float | None = None, **settings: Any
) -> tuple[list[float], accelerate.Accelerator]:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation, **settings)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
    torch.manual_seed(7)
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, accelerator


@pytest.mark.parametrize(
    ("window", "settings"),
    [
        (1, {}),
        (2, {"accumulation": 3, "clip": 0.5}),
        (2, {"accumulation": 3, "clip": 0.5, "mixed_precision": "bf16"}),
        ("auto", {"clip": 0.5}),
    ],
)
def test_the_loop_trains_an_offloaded_model(window: int | str, settings: dict[str, Any]) -> None:
    model, optimizer = offloaded(CASE, window=window)
    losses, _ = trained(model, optimizer, **settings)
    plain, adamw = ordinary(CASE)
    expected, _ = trained(plain, adamw, **settings)
    assert len(set(losses)) == 12
    tolerance = 1e-2 if "mixed_precision" in settings else 1e-5
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=1e-6)
    if "mixed_precision" not in settings:
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.dist(parameter, other) <= 1e-4 * other.norm(), name


def test_its_saved_state_goes_on_to_the_bit_in_fp32(tmp_path: Path) -> None:
    model, optimizer = offloaded(CASE, window=2)
    _, accelerator = trained(model, optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*state dictionaries")
        accelerator.save_state(str(tmp_path))
    expected = snapshot(model, optimizer)
    model, optimizer = offloaded(CASE, window=1)
    _, accelerator = trained(model, optimizer)
    accelerator.load_state(str(tmp_path))
    assert differences(snapshot(model, optimizer), expected) == []


def test_in_bf16_a_saved_state_has_lost_bits_and_says_so(tmp_path: Path) -> None:
    _, accelerator = trained(*offloaded(CASE, window=2, dtype=torch.bfloat16))
    with pytest.warns(RuntimeWarning, match=r"goes on from rounded weights.*checkpoint\.save"):
        accelerator.save_state(str(tmp_path))


def test_clipping_under_in_backward_is_refused_and_its_norm_is_told() -> None:
    adamw = {"update": "in_backward"}
    with pytest.raises(OffloadedModelError, match="gradients cannot be scaled"):
        trained(*offloaded(CASE, window=2, adamw=adamw), clip=1e-3)
    losses, _ = trained(*offloaded(CASE, window=2, adamw=adamw), clip=float("inf"))
    expected, _ = trained(*ordinary(CASE))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
