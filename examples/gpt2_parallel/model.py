"""GPT-2 (Radford et al. 2019), of transformers' own parts, as a row of layers that can be cut into stages."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel


def config(*, layers: int, hidden: int, heads: int, sequence: int, vocabulary: int) -> GPT2Config:
    """Returns a GPT-2's configuration; without dropout, whose random numbers would be each process's own."""
    return GPT2Config(
        n_layer=layers,
        n_embd=hidden,
        n_head=heads,
        n_positions=sequence,
        vocab_size=vocabulary,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=vocabulary - 1,
        eos_token_id=vocabulary - 1,
        attn_implementation="sdpa",  # which is causal where a block is given no mask, as it is in a row
    )


def gpt2(config: GPT2Config) -> nn.Sequential:
    """Returns the embedding, ``config.n_layer`` blocks and the head, with GPT2LMHeadModel's initial weights.

    It takes token ids (batch, sequence) and returns scores (batch, sequence, vocabulary). The head's weight is the
    embedding's.
    """
    whole = GPT2LMHeadModel(config)
    return nn.Sequential(Embedding(whole), *whole.transformer.h, Head(whole))


def loss(scores: Tensor, tokens: Tensor) -> Tensor:
    """Returns the mean cross-entropy of each token's scores and the token behind it, in nats."""
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Embedding(nn.Module):
    """Token ids (batch, sequence) to what the first block takes: (batch, sequence, hidden)."""

    def __init__(self, whole: GPT2LMHeadModel) -> None:
        super().__init__()
        self.tokens, self.positions = whole.transformer.wte, whole.transformer.wpe

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class Head(nn.Module):
    """What the last block returns, (batch, sequence, hidden), to scores (batch, sequence, vocabulary)."""

    def __init__(self, whole: GPT2LMHeadModel) -> None:
        super().__init__()
        self.norm, self.scores = whole.transformer.ln_f, whole.lm_head

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.norm(x))
