"""Full fine-tuning of a Flux-shaped diffusion transformer in bf16: two rows of blocks pass through one window.

Latents and text are two streams in the first row of blocks and one in the second, as in Flux.1 (19 and 38 blocks, 12 B
parameters). Masters are exact, moments have eight bits, and each block is updated as soon as its gradient is there: 6
bytes per parameter, in host memory. The layers' inputs wait there as well.

python examples/flux.py [device]
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stronghold


def rotary(positions: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Returns the rotations of each token, (tokens, head / 2, 2, 2), for its ``positions``, one for each axis."""
    angles = []
    for axis, size in enumerate(axes):
        rates = 10_000.0 ** (-torch.arange(0, size, 2, device=positions.device) / size)
        angles.append(positions[:, axis, None] * rates)
    cos, sin = torch.cat(angles, dim=-1).cos(), torch.cat(angles, dim=-1).sin()
    return torch.stack([cos, -sin, sin, cos], dim=-1).unflatten(-1, (2, 2))


def attention(q: Tensor, k: Tensor, v: Tensor, rotations: Tensor) -> Tensor:
    """Attention of all heads, (batch, heads, tokens, head), over rotated queries and keys."""

    def rotated(x: Tensor) -> Tensor:
        pairs = x.float().unflatten(-1, (-1, 1, 2))
        return (rotations * pairs).sum(-1).flatten(-2).to(x.dtype)

    out = F.scaled_dot_product_attention(rotated(q), rotated(k), v)
    return out.transpose(1, 2).flatten(-2)


class Attended(nn.Module):
    """One stream's queries, keys and values, the first two normalised, and its projection."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(size, 3 * size)
        self.norm_q, self.norm_k = nn.RMSNorm(size // heads), nn.RMSNorm(size // heads)
        self.proj = nn.Linear(size, size)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.norm_q(q), self.norm_k(k), v


class Stream(nn.Module):
    """What a block has for each of two streams."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(size, 6 * size)
        self.before, self.behind = (nn.LayerNorm(size, elementwise_affine=False) for _ in range(2))
        self.attended = Attended(size, heads)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(approximate="tanh"), nn.Linear(4 * size, size))


class DoubleBlock(nn.Module):
    """Latents and text attend to each other, each with weights of its own."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.latents, self.text = Stream(size, heads), Stream(size, heads)

    def forward(self, latents: Tensor, text: Tensor, condition: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor]:
        streams, found = ((self.text, text), (self.latents, latents)), []
        modulations = [one.modulation(F.silu(condition))[:, None].chunk(6, dim=-1) for one, _ in streams]
        for (one, x), (shift, scale, *_) in zip(streams, modulations, strict=True):
            found.append(one.attended.split((1 + scale) * one.before(x) + shift))
        q, k, v = (torch.cat(parts, dim=2) for parts in zip(*found, strict=True))
        both = attention(q, k, v, rotations).split([text.shape[1], latents.shape[1]], dim=1)
        outputs = []
        for (one, x), part, (_, _, gate, shift, scale, last) in zip(streams, both, modulations, strict=True):
            x = x + gate * one.attended.proj(part)
            outputs.append(x + last * one.mlp((1 + scale) * one.behind(x) + shift))
        text, latents = outputs
        return latents, text


class SingleBlock(nn.Module):
    """Both streams are one, attention and MLP side by side."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(size, 3 * size)
        self.norm = nn.LayerNorm(size, elementwise_affine=False)
        self.attended = Attended(size, heads)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: Tensor, condition: Tensor, rotations: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(F.silu(condition))[:, None].chunk(3, dim=-1)
        y = (1 + scale) * self.norm(x) + shift
        attended = self.attended.proj(attention(*self.attended.split(y), rotations))
        return x + gate * (attended + self.down(F.gelu(self.up(y), approximate="tanh")))


class Flux(nn.Module):
    """Predicts the velocity of latents, (batch, tokens, channels), at a time between 0 and 1, given text and its sum.

    ``text`` is (batch, words, text_size), ``pooled`` (batch, pooled_size), ``positions`` (tokens, 3) those of the
    latents; words have position 0.
    """

    def __init__(
        self,
        *,
        double: int = 3,
        single: int = 4,
        size: int = 64,
        axes: tuple[int, ...] = (4, 6, 6),
        channels: int = 8,
        text_size: int = 32,
        pooled_size: int = 16,
    ) -> None:
        super().__init__()
        self.axes, heads = axes, size // sum(axes)
        self.latents_in, self.text_in = nn.Linear(channels, size), nn.Linear(text_size, size)
        self.time_in, self.pooled_in = (
            nn.Sequential(nn.Linear(inputs, size), nn.SiLU(), nn.Linear(size, size)) for inputs in (256, pooled_size)
        )
        self.double_blocks = nn.ModuleList(DoubleBlock(size, heads) for _ in range(double))
        self.single_blocks = nn.ModuleList(SingleBlock(size, heads) for _ in range(single))
        self.modulation = nn.Linear(size, 2 * size)
        self.norm = nn.LayerNorm(size, elementwise_affine=False)
        self.out = nn.Linear(size, channels)

    def forward(self, latents: Tensor, time: Tensor, text: Tensor, pooled: Tensor, positions: Tensor) -> Tensor:
        rates = torch.exp(-torch.arange(128, device=time.device) * (9.21 / 128))
        waves = 1000.0 * time.float()[:, None] * rates
        waves = torch.cat([waves.cos(), waves.sin()], dim=-1).to(latents.dtype)
        condition = self.time_in(waves) + self.pooled_in(pooled)
        words = text.shape[1]
        rotations = rotary(torch.cat([positions.new_zeros(words, positions.shape[1]), positions]), self.axes)
        latents, text = self.latents_in(latents), self.text_in(text)
        for block in self.double_blocks:
            latents, text = block(latents, text, condition, rotations)
        x = torch.cat([text, latents], dim=1)
        for block in self.single_blocks:
            x = block(x, condition, rotations)
        shift, scale = self.modulation(F.silu(condition))[:, None].chunk(2, dim=-1)
        return self.out((1 + scale) * self.norm(x[:, words:]) + shift)


def flow_matching_loss(model: nn.Module, latents: Tensor, generator: torch.Generator, **given: Tensor) -> Tensor:
    """Mean square of what the model's velocity lacks, at times of a logit-normal distribution (arXiv 2403.03206).

    Latents at time t are ``(1 - t) latents + t noise``, so that their velocity is ``noise - latents``.
    """
    noise = torch.randn(latents.shape, generator=generator).to(latents)
    time = torch.randn(len(latents), generator=generator).sigmoid().to(latents.device)
    mixed = torch.lerp(latents.float(), noise.float(), time[:, None, None]).to(latents.dtype)
    velocity = model(mixed, time, **given)
    return F.mse_loss(velocity.float(), noise.float() - latents.float())


def batch(device: str | torch.device, dtype: torch.dtype, samples: int = 16, side: int = 4) -> dict[str, Tensor]:
    """Returns latents of ``side`` by ``side`` tokens that follow from random text, and the model's other inputs."""
    generator = torch.Generator().manual_seed(1)
    text, into = torch.randn(samples, 6, 32, generator=generator), torch.randn(32, side * side * 8, generator=generator)
    latents = (text.mean(1) @ into).view(samples, side * side, 8).tanh()
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    positions = torch.stack([torch.zeros(side * side), rows.flatten(), columns.flatten()], dim=-1)
    found = {"latents": latents, "text": text, "pooled": text.mean(1)[:, :16]}
    return {name: value.to(device, dtype) for name, value in found.items()} | {"positions": positions.to(device)}


def main(device: str) -> None:
    torch.manual_seed(0)
    model = Flux()
    model = stronghold.offload(model, window=2, device=device, dtype=torch.bfloat16, activations="host")
    optimizer = stronghold.AdamW(model.parameters(), lr=2e-3, states="8bit", update="in_backward")
    generator = torch.Generator().manual_seed(2)
    given = batch(device, torch.bfloat16)
    for step in range(12):
        loss = flow_matching_loss(model, generator=generator, **given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1:2}  loss {loss.item():.4f}")
    print(stronghold.report(model))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu")
