"""Small mixtures of experts of transformers. Holds no tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

EXPERTS = 8
_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}


def _qwen3() -> nn.Module:
    more = {"num_experts": EXPERTS, "intermediate_size": 64, "moe_intermediate_size": 16}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_COMMON, **_GROUPED, **more))


def _deepseek() -> nn.Module:
    config = transformers.DeepseekV3Config(
        **{**_COMMON, "num_experts_per_tok": 4},
        intermediate_size=64,
        moe_intermediate_size=16,
        num_key_value_heads=4,
        n_routed_experts=EXPERTS,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def _gpt_oss() -> nn.Module:
    config = transformers.GptOssConfig(**_COMMON, **_GROUPED, intermediate_size=16, num_local_experts=EXPERTS)
    return transformers.GptOssForCausalLM(config)


def ernie() -> nn.Module:
    """A mixture whose router's weights transformers keeps in fp32, where they are parameters."""
    config = transformers.Ernie4_5_MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        moe_num_experts=4,
        moe_k=2,
        moe_layer_start_index=0,
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(1)
    return transformers.Ernie4_5_MoeForCausalLM(config)


FAMILIES: dict[str, Callable[[], nn.Module]] = {"qwen3": _qwen3, "deepseek": _deepseek, "gpt_oss": _gpt_oss}
"""Experts without biases, with a shared one beside them, and with biases and transposed."""


def model(
    family: str = "qwen3", dtype: torch.dtype = torch.float32, *, frozen: bool = False, how: str = "eager"
) -> nn.Module:
    """Returns a model in training mode; ``frozen`` but for the attention's queries, or trained in full."""
    torch.manual_seed(1)
    made = FAMILIES[family]()
    for name, parameter in made.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.1)
        parameter.requires_grad_(not frozen or "q_proj" in name or "q_a_proj" in name)
    made.config._experts_implementation = how
    return made.to(dtype).train()


def batches(count: int, *, samples: int = 2, tokens: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 64, (samples, tokens), generator=generator) for _ in range(count)]


def train(of: nn.Module, optimizer: torch.optim.Optimizer, steps: list[Tensor]) -> list[float]:
    losses = []
    for batch in steps:
        loss = of(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(of: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in of.parameters() if parameter.requires_grad]
