"""The reference GPT: the model that the main job trains and every method is compared on."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stronghold.lab.models.cross_entropy import linear_cross_entropy

M = TypeVar("M", bound=nn.Module)

MODEL_TYPE = "stronghold-gpt"
"""The word in the config.json of a saved one."""

_MOST_LAYERS = 2**16
_MOST_PARAMETERS = 2**50
"""More than any memory or disk: beyond are slips of the pen, and sizes that PyTorch cannot count."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a reference GPT. ``sequence`` is the longest input, in tokens."""

    layers: int
    hidden: int
    heads: int = 16
    sequence: int = 1024
    vocabulary: int = 51200
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1 (got {value!r}); pass one")
        if self.hidden % (2 * self.heads):
            raise ValueError(
                "hidden must be a multiple of 2 · heads, for rotary positions turn pairs of each head's "
                f"elements (got hidden={self.hidden}, heads={self.heads}); "
                f"pass hidden={-(-self.hidden // (2 * self.heads)) * 2 * self.heads} or other heads"
            )
        if self.layers > _MOST_LAYERS:
            raise ValueError(
                f"layers must be at most {_MOST_LAYERS:,}, for each is modules that Python builds (got "
                f"{self.layers}); pass fewer, wider ones"
            )
        if self.parameters > _MOST_PARAMETERS:
            raise ValueError(
                f"a model must have at most 2**50 parameters, 4 PiB in fp32 (got layers={self.layers}, "
                f"hidden={self.hidden}, vocabulary={self.vocabulary}); pass a smaller shape"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and below 1 (got {self.dropout}); pass one such")

    @property
    def separator(self) -> int:
        """The id that separates documents: the one after the vocabulary's last."""
        return self.vocabulary

    @property
    def rows(self) -> int:
        """Rows of the embedding table: vocabulary and separator, rounded up to a multiple of 128."""
        return -(-(self.vocabulary + 1) // 128) * 128

    @property
    def parameters(self) -> int:
        """The parameter count: 12·l·h² + 13·l·h + rows·h + 2h."""
        layers, hidden = self.layers, self.hidden
        return 12 * layers * hidden**2 + 13 * layers * hidden + self.rows * hidden + 2 * hidden


class GPTOutput(NamedTuple):
    """What ``GPT.forward`` returns: the loss where labels are given, the logits where none are."""

    loss: Tensor | None
    logits: Tensor | None


class GPT(nn.Module):
    """A pre-LayerNorm GPT with rotary positions and a head tied to the embedding.

    It is initialised as GPT-2 is (Radford et al. 2019): normal with std 0.02, projections that end in the
    residual stream divided by sqrt(2 · layers), biases zero; the same for the same ``torch.manual_seed``.
    Built on the meta device it has no values: offload it with ``weights=model.initialize_module``, or call
    :meth:`initialize` after ``to_empty``.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = _bare(nn.Embedding, config.rows, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        if not self.norm.weight.is_meta:  # without values there is nothing to draw
            self.initialize()

    def config_dict(self) -> dict[str, Any]:
        """Returns what ``stronghold.save`` writes as config.json."""
        return {"model_type": MODEL_TYPE, **asdict(self.config)}

    @classmethod
    def from_config_dict(cls, settings: dict[str, Any]) -> "GPT":
        """Builds the model of a config.json on the meta device, for ``stronghold.load(..., model_class=GPT)``."""
        with torch.device("meta"):
            return cls(GPTConfig(**{name: settings[name] for name in settings if name != "model_type"}))

    def initialize(self) -> None:
        """Draws every parameter anew from the default generator."""
        self.apply(self.initialize_module)

    @torch.no_grad()
    def initialize_module(self, module: nn.Module) -> None:
        """Draws the parameters of one module of this model: what ``offload(weights=)`` calls layer by layer."""
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Embedding | nn.Linear):
            ends_in_residual = isinstance(module, IntoResidual)
            std = 0.02 / math.sqrt(2 * self.config.layers) if ends_in_residual else 0.02
            nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> GPTOutput:
        """Returns the mean loss over ``labels``, or without labels the logits (batch, sequence, rows).

        ``input_ids`` and ``labels`` are int64 (batch, sequence). As in transformers, labels are not shifted
        yet and usually equal ``input_ids``: position t is scored by label t + 1; −100 is ignored.
        """
        sequence = input_ids.shape[1]
        if sequence > self.config.sequence:
            raise ValueError(
                f"an input must not be longer than the model's sequence (got {sequence} tokens, "
                f"sequence={self.config.sequence}); shorten it, or build the model with a longer sequence"
            )
        x = self.embed(input_ids)
        cos, sin = rotary(sequence, self.config.hidden // self.config.heads, x.device)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.score(x, labels)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Returns what the first layer sees, (batch, sequence, hidden)."""
        x: Tensor = self.dropout(self.embedding(input_ids))
        return x

    def score(self, x: Tensor, labels: Tensor | None = None) -> GPTOutput:
        """Returns the loss, or without labels the logits, of the last layer's output ``x``."""
        x = self.norm(x)
        if labels is None:
            return GPTOutput(loss=None, logits=F.linear(x, self.embedding.weight))
        return GPTOutput(loss=next_token_loss(x, self.embedding.weight, labels), logits=None)


def next_token_loss(x: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean loss of ``x`` (batch, sequence, hidden), normalized, under ``head`` (rows, hidden).

    ``labels`` are as in :meth:`GPT.forward`.
    """
    batch, sequence, _ = x.shape
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)  # moving labels, not x, spares a copy of x
    return linear_cross_entropy(x.reshape(batch * sequence, -1), head, shifted.reshape(-1))


class IntoResidual(nn.Linear):
    """A projection that ends in the residual stream, and is initialised accordingly."""


class Block(nn.Module):
    """One layer: causal self-attention and a GELU MLP of width 4h, each on a LayerNorm of its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.heads = config.heads
        self.attention_dropout = config.dropout
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = _bare(nn.Linear, hidden, 3 * hidden)
        self.out = _bare(IntoResidual, hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.up = _bare(nn.Linear, hidden, 4 * hidden)
        self.down = _bare(IntoResidual, 4 * hidden, hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns ``x`` (batch, sequence, hidden) after this layer; ``cos`` and ``sin`` as from rotary()."""
        x = x + self.dropout(self._attend(self.attention_norm(x), cos, sin))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        split = self.qkv(x).view(batch, sequence, 3, self.heads, hidden // self.heads)
        split = split.permute(2, 0, 3, 1, 4)  # query, key and value, each (batch, heads, sequence, head size)
        query, key = _rotate(split[:2], cos, sin)
        attended = F.scaled_dot_product_attention(
            query,
            key,
            split[2],
            dropout_p=self.attention_dropout if self.training else 0.0,
            is_causal=True,
        )
        return self.out(attended.transpose(1, 2).reshape(batch, sequence, hidden))


def rotary(sequence: int, head_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of every position's angles, fp32 (1, 1, sequence, head_size / 2).

    After Su et al., RoFormer (2021), base 10000. They are computed in each forward pass, not kept as buffers:
    so they stay fp32 in a bf16 model and need no place of their own.
    """
    pairs = head_size // 2
    frequencies = 10000.0 ** (-torch.arange(pairs, dtype=torch.float32, device=device) / pairs)
    angles = torch.outer(torch.arange(sequence, dtype=torch.float32, device=device), frequencies)
    return angles.cos()[None, None], angles.sin()[None, None]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _bare(kind: Callable[..., M], *shape: int) -> M:
    """Returns a module without values: PyTorch's own initialisation would be drawn only to be redrawn."""
    module: M = torch.nn.utils.skip_init(kind, *shape, device=torch.get_default_device())  # type: ignore
    return module
