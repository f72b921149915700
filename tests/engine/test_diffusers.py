"""diffusers' Wan and Flux train offloaded as in memory: all weights, and PEFT's adapters; fp32 and bf16.

Adapters are fp32 over a frozen base, and torch's AdamW steps both models: to the bit, as with all weights in fp32. All
weights in bf16 have exact masters, which a few lines of torch keep for the plain model: to rounding, and to the bit
between placements.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import peft
import pytest
import torch
from torch import Tensor, nn

import stronghold
from tests.adapters import trained, with_adapters
from tests.crossed import crossed
from tests.examples.test_flux import Masters

TARGETS = ["to_q", "to_v"]
ADAPTERS: dict[str, peft.PeftConfig] = {
    "lora": peft.LoraConfig(r=2, target_modules=TARGETS, lora_dropout=0.1),
    "dora": peft.LoraConfig(r=2, target_modules=TARGETS, use_dora=True),
    "ia3": peft.IA3Config(target_modules=TARGETS, feedforward_modules=[]),
    "vera": peft.VeraConfig(r=4, target_modules=TARGETS),
}
SAMPLES = 2


def wan() -> nn.Module:
    shape = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "num_layers": 3}
    given = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16, "rope_max_seq_len": 32}
    return diffusers.WanTransformer3DModel(**shape, **given)


def wans_inputs(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "hidden_states": torch.randn(SAMPLES, 4, 2, 4, 4, generator=generator).to(dtype),
        "timestep": torch.randint(0, 1000, (SAMPLES,), generator=generator),
        "encoder_hidden_states": torch.randn(SAMPLES, 5, 16, generator=generator).to(dtype),
    }


def flux() -> nn.Module:
    shape = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
    given = {"in_channels": 4, "joint_attention_dim": 16, "pooled_projection_dim": 16, "axes_dims_rope": (4, 4, 8)}
    return diffusers.FluxTransformer2DModel(patch_size=1, **shape, **given)


def fluxs_inputs(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "hidden_states": torch.randn(SAMPLES, 16, 4, generator=generator).to(dtype),
        "timestep": torch.rand(SAMPLES, generator=generator).to(dtype),
        "encoder_hidden_states": torch.randn(SAMPLES, 5, 16, generator=generator).to(dtype),
        "pooled_projections": torch.randn(SAMPLES, 16, generator=generator).to(dtype),
        "img_ids": torch.cartesian_prod(*map(torch.arange, (1, 4, 4))).to(dtype),
        "txt_ids": torch.zeros(5, 3, dtype=dtype),
    }


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., dict[str, Tensor]], int]] = {
    "wan": (wan, wans_inputs, 3),
    "flux": (flux, fluxs_inputs, 4),
}
"""Each with its inputs and the number of its layers."""


def built(name: str, dtype: torch.dtype, method: str) -> nn.Module:
    torch.manual_seed(1)
    model = MODELS[name][0]().to(dtype).train()
    return model if method == "all" else with_adapters(model, ADAPTERS[method])


def losses_of(name: str, model: nn.Module, optimizer: Any, dtype: torch.dtype, steps: int) -> list[float]:
    """Returns the losses of flow matching: the mean square of what is predicted less noise and sample."""
    generator, losses = torch.Generator().manual_seed(2), []
    for step in range(steps):
        inputs = MODELS[name][1](generator, dtype)
        noise = torch.randn(inputs["hidden_states"].shape, generator=generator)
        torch.manual_seed(step)  # of dropout
        found = model(**inputs, return_dict=False)[0]
        loss = (found.float() - (noise - inputs["hidden_states"].float())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gradients_of(name: str, model: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """Returns the gradients of one batch, in the type of the weights, and leaves none."""
    inputs = MODELS[name][1](torch.Generator().manual_seed(4), dtype)
    model(**inputs, return_dict=False)[0].float().square().mean().backward()
    found = [p.grad.to(dtype, copy=True) for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def compare(
    folder: Path, name: str, method: str, dtype: torch.dtype, places: list[tuple[int, str]], steps: int
) -> None:
    masters = method == "all" and dtype == torch.bfloat16
    plain = built(name, dtype, method)
    stepped = Masters(plain) if masters else torch.optim.AdamW(trained(plain), lr=2e-3, foreach=False)
    gradients = gradients_of(name, plain, dtype) if masters else []
    expected = losses_of(name, plain, stepped, dtype, steps)
    assert len(set(expected)) == steps
    rows = []
    for window, store in places:
        where = "ram" if store == "ram" else str(folder / f"{window}")
        model = built(name, dtype, method)
        stronghold.offload(model, device="cpu", window=window, store=where, dtype=dtype if masters else None)
        optimizer: Any = torch.optim.AdamW(trained(model), lr=2e-3, foreach=False)
        if masters:
            found = gradients_of(name, model, dtype)
            assert len(found) == len(gradients) == len([*plain.parameters()])
            assert all(map(torch.equal, found, gradients))
            optimizer = stronghold.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
        rows.append(losses_of(name, model, optimizer, dtype, steps))
        if not masters:
            for (key, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(parameter, other), key
        stronghold.close(model)
    assert all(row == rows[0] for row in rows)
    if masters:  # our updates differ in their last bits, and then a weight in its rounding to bf16
        assert rows[0][:10] == pytest.approx(expected[:10], rel=1e-3)
        assert rows[0] == pytest.approx(expected, rel=2**-8)
    else:
        assert rows[0] == expected


CASES = [("wan", "all"), ("wan", "lora"), ("flux", "lora")]
"""Models and what is trained of them: all of their weights, or one kind of PEFT's adapters."""
PLACES = {
    torch.float32: [(1, "ram"), (2, "disk"), (-1, "ram")],
    torch.bfloat16: [(1, "disk"), (2, "ram"), (-1, "disk")],
}
"""Windows, -1 for all layers."""


@pytest.mark.parametrize(("case", "dtype"), crossed(CASES, [*PLACES], together=1), ids=str)
def test_diffusers_models_learn_the_bits_that_they_learn_in_memory(
    tmp_path: Path, case: tuple[str, str], dtype: torch.dtype
) -> None:
    name, method = case
    places = [(window if window > 0 else MODELS[name][2], store) for window, store in PLACES[dtype]]
    compare(tmp_path, name, method, dtype, places, steps=4)


@pytest.mark.long
@pytest.mark.parametrize("dtype", PLACES, ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "method"), [*CASES, *((name, method) for name in MODELS for method in ("dora", "ia3", "vera"))]
)
def test_and_for_fifty_steps(tmp_path: Path, name: str, method: str, dtype: torch.dtype) -> None:
    places = [(window if window > 0 else MODELS[name][2], store) for window, store in PLACES[dtype]]
    compare(tmp_path, name, method, dtype, places, steps=50)
