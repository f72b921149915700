"""What is trained of a layer that is frozen but for a little stays beside it, on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import stronghold
from stronghold.errors import OffloadedModelError
from stronghold.unit import unit_of
from tests.adapters import CONFIGS, LAYERS, PLACES, adapted, batches, offload, train, trained
from tests.crossed import crossed
from tests.reference import differences, snapshot


@pytest.mark.parametrize(
    ("name", "settings"),
    # Dropout draws anew for each micro-batch.
    [
        one
        for one in crossed(["dora", "lora", "ia3", "vera"], PLACES, together=1)
        if (one.values[0], *one.values[1]) != ("lora", "window", "micro_batch")
    ],
    ids=str,
)
def test_adapters_in_fp32_on_a_base_in_bf16_learn_the_bits_that_they_learn_in_memory(
    tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    plain, model = adapted(CONFIGS[name]), offload(tmp_path, adapted(CONFIGS[name]), **settings)
    assert {unit_of(p).name for p in trained(model)} == {
        f"base_model.model.model.layers.{number} (trained)" for number in range(LAYERS)
    }
    rows = [
        train(one, torch.optim.AdamW(trained(one), lr=1e-2, foreach=False), accumulation=2) for one in (plain, model)
    ]
    if "micro_batch" not in settings:  # products of other shapes round in other ways
        assert rows[1] == rows[0]
        for (key, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(parameter, other), key
    else:
        torch.testing.assert_close(rows[1], rows[0], rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    ("dtype", "update"), crossed([None, torch.bfloat16], ["deferred", "in_backward"], together=1), ids=str
)
def test_every_place_trains_the_same_bits(tmp_path: Path, dtype: torch.dtype | None, update: str) -> None:
    found = []
    for number, settings in enumerate([{"window": 2}, *(one for one in PLACES if "micro_batch" not in one)]):
        model = offload(tmp_path / str(number), adapted(CONFIGS["lora"]), dtype=dtype, **settings)
        optimizer = stronghold.AdamW(trained(model), lr=1e-2, update=update if number else "deferred")
        found.append((train(model, optimizer), snapshot(model, optimizer)))
    for losses, state in found[1:]:
        assert losses == found[0][0]
        assert differences(state, found[0][1]) == []


def test_a_step_makes_nothing_stale_but_them() -> None:
    model = stronghold.offload(adapted(CONFIGS["lora"]), device="cpu", window=LAYERS)
    optimizer = stronghold.AdamW(trained(model), lr=1e-2)
    train(model, optimizer, steps=1)
    train(model, optimizer, steps=3)
    step = stronghold.report(model).step
    assert step is not None and step.fetches == 0


def test_a_frozen_base_takes_its_weights_in_the_type_that_it_computes_in() -> None:
    model = adapted(CONFIGS["lora"], torch.float32)
    counts = {p: p.numel() for p in model.parameters()}
    packed = sum(count * (4 if p.requires_grad else 2) for p, count in counts.items())  # a master is of 32 bits
    stronghold.offload(model, device="cpu", window=1, dtype=torch.bfloat16)
    assert packed <= stronghold.report(model).host_bytes <= 1.02 * packed


def test_a_layer_that_is_trained_by_more_than_an_eighth_keeps_its_parameters_together() -> None:
    model = adapted(peft.LoraConfig(r=16, target_modules="all-linear"))
    stronghold.offload(model, device="cpu", window=2)
    assert {unit_of(p).layer for p in trained(model)} == set(range(LAYERS))


def test_a_backward_pass_to_adapters_that_were_updated_since_is_refused() -> None:
    model = stronghold.offload(adapted(CONFIGS["dora"]), device="cpu", window=2)
    optimizer = stronghold.AdamW(trained(model), lr=1e-2)
    train(model, optimizer, steps=1)
    (ids,) = batches(1)
    early = model(input_ids=ids, labels=ids).loss
    train(model, optimizer, steps=1)
    with pytest.raises(OffloadedModelError, match=r"the weights of .*layers.3 must be the same in the backward pass"):
        early.backward()


def test_adapters_that_their_layer_writes_need_its_activations() -> None:
    """OFT keeps its rotations small by a write in its forward pass, where they are trained with ``coft=True``."""
    config = peft.OFTConfig(oft_block_size=16, target_modules=["q_proj", "v_proj"], coft=True)
    plain, model, other = (adapted(config, torch.float32) for _ in range(3))
    stronghold.offload(model, device="cpu", window=1, activations="keep")
    stronghold.offload(other, device="cpu", window=1)
    (ids,) = batches(1)
    for one in plain, model:
        one(input_ids=ids, labels=ids).loss.backward()
    for parameter, expected in zip(trained(model), trained(plain), strict=True):
        assert torch.equal(parameter, expected)
        assert torch.equal(parameter.grad, expected.grad)
    with pytest.raises(OffloadedModelError, match=r"writes its own weights needs offload\(..., activations='keep'\)"):
        other(input_ids=ids, labels=ids).loss.backward()


def test_a_base_that_is_trained_later_learns_what_it_learns_in_memory() -> None:
    plain, model = adapted(CONFIGS["dora"], torch.float32), adapted(CONFIGS["dora"], torch.float32)
    stronghold.offload(model, device="cpu", window=2)
    rows = []
    for one, adamw in ((plain, torch.optim.AdamW), (model, stronghold.AdamW)):
        losses = train(one, adamw(trained(one), lr=1e-2))
        for name, parameter in one.named_parameters():
            if "down_proj.base_layer" in name:
                parameter.requires_grad_(True)
        rows.append(losses + train(one, adamw(trained(one), lr=1e-2)))
    torch.testing.assert_close(rows[1], rows[0], rtol=1e-5, atol=0)
