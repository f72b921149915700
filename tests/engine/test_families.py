"""Families of today under PEFT's adapters: experts, latent attention, windows of attention. Fifty steps, to the bit.

Adapters are fp32, as PEFT makes them, over a frozen base in fp32 or bf16, or one whose linear weights bitsandbytes or
torchao have quantised; torch's AdamW steps both models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import stronghold
from tests.adapters import packed_by_bitsandbytes, trained, with_adapters

quantization = pytest.importorskip("torchao.quantization")

LAYERS = 4
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE, head_dim=8))


def qwen3_moe() -> nn.Module:
    config = transformers.Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=8, num_experts=4, mlp_only_layers=[1])
    return transformers.Qwen3MoeForCausalLM(config)


def deepseek_v3() -> nn.Module:
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    routed = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    heads = SHAPE | {"num_key_value_heads": 4}
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**heads, **EXPERTS, **latent, **routed))


def gemma3() -> nn.Module:
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2), "sliding_window": 4}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SHAPE, **kinds, head_dim=8))


FAMILIES = {"llama": llama, "qwen3": qwen3, "qwen3_moe": qwen3_moe, "deepseek_v3": deepseek_v3, "gemma3": gemma3}
TARGETS = {"deepseek_v3": ["q_b_proj", "kv_b_proj", "o_proj"]}
METHODS = ("lora", "dora", "ia3", "vera")
PLACES = {
    torch.float32: [(1, "ram"), (2, "disk"), (LAYERS, "ram")],
    torch.bfloat16: [(1, "disk"), (2, "ram"), (LAYERS, "disk")],
}


def adapters(method: str, family: str) -> peft.PeftConfig:
    targets = TARGETS.get(family, ["q_proj", "v_proj", "o_proj"])
    if method == "ia3":
        return peft.IA3Config(target_modules=targets, feedforward_modules=[])
    if method == "vera":
        return peft.VeraConfig(r=4, target_modules=targets[:2])
    return peft.LoraConfig(r=2, target_modules=targets, use_dora=method == "dora", lora_dropout=0.1)


def adapted(family: str, method: str, dtype: torch.dtype, base: str | None = None) -> nn.Module:
    """Returns a model with adapters, whose layers' linear weights are quantised with ``base``."""
    torch.manual_seed(1)
    model: Any = FAMILIES[family]().to(dtype).train()
    if base in ("nf4", "int8"):
        packed_by_bitsandbytes(model, model.model.layers, base, dtype)
    elif base is not None:
        quantization.quantize_(model.requires_grad_(False).model.layers, getattr(quantization, base)())
    return with_adapters(model, adapters(method, family))


def losses_of(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2, foreach=False)
    generator, losses = torch.Generator().manual_seed(2), []
    for step in range(steps):
        ids = torch.randint(0, SHAPE["vocab_size"], (2, 8), generator=generator)
        torch.manual_seed(step)  # of dropout
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(
    folder: Path,
    family: str,
    method: str,
    dtype: torch.dtype,
    places: list[tuple[int, str]],
    steps: int,
    base: str | None = None,
) -> None:
    plain = adapted(family, method, dtype, base)
    expected = losses_of(plain, steps)
    assert len(set(expected)) == steps
    for window, store in places:
        where = "ram" if store == "ram" else str(folder / f"{window}")
        model = stronghold.offload(adapted(family, method, dtype, base), device="cpu", window=window, store=where)
        assert losses_of(model, steps) == expected, (window, store)
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            if not hasattr(other, "__tensor_flatten__"):
                assert torch.equal(parameter, other), name
        stronghold.close(model)


@pytest.mark.parametrize(
    ("family", "method", "dtype", "place"),
    [
        ("qwen3_moe", "lora", torch.bfloat16, (2, "ram")),
        ("deepseek_v3", "dora", torch.float32, (1, "ram")),
        ("gemma3", "ia3", torch.bfloat16, (2, "disk")),
    ],
    ids=str,
)
def test_they_learn_the_bits_that_they_learn_in_memory(
    tmp_path: Path, family: str, method: str, dtype: torch.dtype, place: tuple[int, str]
) -> None:
    compare(tmp_path, family, method, dtype, [place], steps=5)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_and_for_fifty_steps_in_every_window(tmp_path: Path, family: str, method: str, dtype: torch.dtype) -> None:
    compare(tmp_path, family, method, dtype, PLACES[dtype], steps=50)


BASES = ("nf4", "int8", "Int8WeightOnlyConfig", "Float8WeightOnlyConfig")
"""bitsandbytes' two, and torchao's by the names of their configurations."""
NOT_PEFTS = [("dora", "int8"), *(("vera", base) for base in BASES if base.endswith("Config"))]
"""What PEFT cannot do in memory: DoRA loses the scales on the CPU, VeRA wants to know how torchao quantised."""
OVER_BASES = [(method, base) for method in METHODS for base in BASES if (method, base) not in NOT_PEFTS]


@pytest.mark.parametrize(
    ("family", "base"),
    [*zip([*FAMILIES][:4], BASES, strict=True), pytest.param("gemma3", "nf4", marks=pytest.mark.long)],
)
def test_over_a_quantised_base_too(tmp_path: Path, family: str, base: str) -> None:
    compare(tmp_path, family, "lora", torch.bfloat16, [(2, "ram"), (1, "disk")], steps=5, base=base)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "method", "base", "dtype"),
    [
        *(("llama", *case, dtype) for case in OVER_BASES for dtype in PLACES),
        ("qwen3", "lora", "Int8WeightOnlyConfig", torch.bfloat16),
        ("qwen3_moe", "lora", "nf4", torch.bfloat16),
        ("deepseek_v3", "lora", "Int8WeightOnlyConfig", torch.bfloat16),
        ("gemma3", "lora", "nf4", torch.bfloat16),
    ],
    ids=str,
)
def test_and_over_each_for_fifty_steps(tmp_path: Path, family: str, method: str, base: str, dtype: torch.dtype) -> None:
    compare(tmp_path, family, method, dtype, PLACES[dtype], steps=50, base=base)
