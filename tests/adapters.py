"""A small Llama with PEFT's adapters, and how it is trained. Holds no tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes
import peft
import torch
import transformers
from torch import Tensor, nn

import stronghold

LAYERS = 4
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "vocab_size": 96}
CONFIGS: dict[str, peft.PeftConfig] = {
    "lora": peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1),
    "dora": peft.LoraConfig(r=2, target_modules="all-linear", use_dora=True),
    "ia3": peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "vera": peft.VeraConfig(r=4, target_modules=["q_proj", "v_proj"]),
}
PLACES: list[dict[str, Any]] = [
    {"window": 1},
    {"window": 2, "activations": "keep"},
    {"window": LAYERS},
    {"window": 2, "store": "disk"},
    {"window": 2, "micro_batch": 1},
    {"resident": 2, "window": 1},
    {},
]


def base(dtype: torch.dtype = torch.bfloat16, **more: Any) -> nn.Module:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(num_hidden_layers=LAYERS, use_cache=False, **{**SHAPE, **more})
    return transformers.LlamaForCausalLM(config).to(dtype).train()


def adapted(config: peft.PeftConfig, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Returns a Llama in ``dtype`` with adapters in fp32, as PEFT makes them, of which none is zero."""
    return with_adapters(base(dtype), config)


def with_adapters(model: nn.Module, config: peft.PeftConfig) -> nn.Module:
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in trained(model):
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def packed_by_bitsandbytes(model: nn.Module, layers: nn.Module, kind: str, dtype: torch.dtype) -> nn.Module:
    """Returns ``model``, frozen, with the linear weights of ``layers`` in "nf4" or "int8", computing in ``dtype``."""
    for module in [*layers.modules()]:
        for name, child in [*module.named_children()]:
            if not isinstance(child, nn.Linear):
                continue
            shape, bias = (child.in_features, child.out_features), child.bias is not None
            linear: Any
            if kind == "int8":
                linear = bitsandbytes.nn.Linear8bitLt(*shape, bias=bias, has_fp16_weights=False, threshold=6.0)
                linear.weight = bitsandbytes.nn.Int8Params(
                    child.weight.data, requires_grad=False, has_fp16_weights=False
                )
            else:
                linear = bitsandbytes.nn.Linear4bit(*shape, bias=bias, compute_dtype=dtype)
                linear.weight = bitsandbytes.nn.Params4bit(
                    child.weight.data, quant_type=kind, compress_statistics=True, module=linear
                )
                linear.support_avx512bf16_for_cpu = False  # else evaluation computes with other bits
            if bias:
                linear.bias = child.bias
            setattr(module, name, linear.to("cpu"))
    return model.requires_grad_(False)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, SHAPE["vocab_size"], (2, 12), generator=generator) for _ in range(count)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4, accumulation: int = 1) -> list[float]:
    losses = []
    for step, ids in enumerate(batches(steps * accumulation), start=1):
        torch.manual_seed(step)  # of dropout
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        if step % accumulation == 0:
            torch.nn.utils.clip_grad_norm_(trained(model), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def offload(tmp_path: Path, model: nn.Module, **settings: Any) -> nn.Module:
    if "store" in settings:
        settings["store"] = str(tmp_path / "store")
    return stronghold.offload(model, device="cpu", **settings)
