"""The models that large.py trains, their arithmetic, and values for them that take no time to draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.lab.models.cross_entropy import CHUNK_BYTES, linear_cross_entropy
from stronghold.lab.models.gpt import GPT, GPTConfig, GPTOutput

TILE = 2**22
LOSS_CHUNK = 2048
"""Tokens that a Llama's loss goes over at a time: 1.05 GB of logits in fp32 for a vocabulary of 128,256, while no layer
computes. The default, 261, would read and write the sum of the head's gradient, 2.1 GB, for every 0.82 TFLOP."""


@dataclass(frozen=True, kw_only=True)
class Large:
    """A model by its shape: ``layers`` of ``layer_parameters`` in matrices, ``hidden`` wide, and a head.

    The loss goes over ``loss_chunk`` tokens at a time.
    """

    name: str
    build: Callable[[], nn.Module]
    layers: int
    hidden: int
    layer_parameters: int
    vocabulary: int
    rows: int
    loss_chunk: int
    sequence: int = 1024


class LlamaWithLoss(nn.Module):
    """A Llama of transformers whose loss never holds all logits: for 16 x 1024 tokens in fp32 they are 8.4 GB."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        import transformers

        self.causal = transformers.LlamaForCausalLM(config)
        with torch.device("cpu"):  # its buffers have values, wherever the parameters are
            self.causal.model.rotary_emb = type(self.causal.model.rotary_emb)(config)

    def forward(self, tokens: Tensor, labels: Tensor) -> GPTOutput:
        """Returns the mean loss of predicting each token of ``labels`` but a sample's first."""
        hidden = self.causal.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
        flat, head = hidden.flatten(0, 1), self.causal.lm_head.weight
        loss = linear_cross_entropy(flat, head, labels[:, 1:].flatten(), chunk=LOSS_CHUNK)
        return GPTOutput(loss=loss, logits=None)


def llama(
    name: str,
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocabulary: int,
    sequence: int = 1024,
) -> Large:
    """Returns a Llama, whose layers have no biases."""

    def build() -> nn.Module:
        import transformers

        config = transformers.LlamaConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=intermediate,
            vocab_size=vocabulary,
            max_position_embeddings=8192,
            rope_theta=500000.0,
            tie_word_embeddings=False,
        )
        return LlamaWithLoss(config)

    attention = 2 * hidden * hidden + 2 * hidden * hidden * kv_heads // heads
    return Large(
        name=name,
        build=build,
        layers=layers,
        hidden=hidden,
        layer_parameters=attention + 3 * hidden * intermediate,
        vocabulary=vocabulary,
        rows=vocabulary,
        loss_chunk=LOSS_CHUNK,
        sequence=sequence,
    )


def gpt(name: str, *, hidden: int, layers: int, heads: int, vocabulary: int, sequence: int = 1024) -> Large:
    """Returns a reference GPT."""
    config = GPTConfig(layers=layers, hidden=hidden, heads=heads, vocabulary=vocabulary, sequence=sequence)
    return Large(
        name=name,
        build=lambda: GPT(config),
        layers=layers,
        hidden=hidden,
        layer_parameters=12 * hidden * hidden,
        vocabulary=vocabulary,
        rows=config.rows,
        loss_chunk=CHUNK_BYTES // (4 * config.rows),
        sequence=sequence,
    )


MODELS = (
    llama("llama-8b", hidden=4096, layers=32, heads=32, kv_heads=8, intermediate=14336, vocabulary=128256),
    gpt("gpt-5b", hidden=2048, layers=100, heads=16, vocabulary=51200),
)
SMALL_MODELS = (
    llama("llama-tiny", hidden=64, layers=4, heads=4, kv_heads=2, intermediate=128, vocabulary=512, sequence=32),
    gpt("gpt-tiny", hidden=64, layers=6, heads=4, vocabulary=512, sequence=32),
)


def flops_of(large: Large, batch: int) -> tuple[int, int]:
    """Returns the FLOPs of a forward pass over ``batch`` samples, of all layers and of the head.

    2 for each of a matrix's parameters and token, and in each layer 4·s·h for a token's attention over s tokens, halved
    for it looks back only.
    """
    tokens = batch * large.sequence
    layer = 2 * large.layer_parameters + 2 * large.sequence * large.hidden
    return large.layers * layer * tokens, 2 * large.rows * large.hidden * tokens


def tile_initialiser(model: nn.Module) -> Callable[[nn.Module], None]:
    """Returns what gives each module of ``model`` values as fast as memory takes them.

    Matrices and tables are normal with std 0.02, cut from one tile of such numbers at a place of their own; vectors are
    one in norms, zero in biases. To draw eight billion numbers one by one would take minutes.
    """
    tile = 0.02 * torch.randn(TILE, generator=torch.Generator().manual_seed(0))
    places = {id(module): number for number, module in enumerate(model.modules())}

    def initialise(module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2:
                nn.init.constant_(parameter, 0.0 if name == "bias" else 1.0)
                continue
            flat, first = parameter.data.view(-1), places[id(module)] * 7919 % TILE
            begin = 0
            while begin < flat.numel():
                part = tile[first : first + flat.numel() - begin]
                flat[begin : begin + part.numel()].copy_(part)
                begin, first = begin + part.numel(), 0

    return initialise
