"""Small models of many kinds, and one loop that trains each with us and with plain PyTorch.

Every model takes one batch and returns its loss, so that a kind is a class and the loop is one for all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stronghold

SIZE = 16
SAMPLES = 4
LENGTH = 6
WORDS = 11


class Block(nn.Module):
    """A residual layer with dropout: the plainest kind."""

    def __init__(self, size: int = SIZE, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Residual(nn.Module):
    """Root parameters before and behind a ModuleList."""

    def __init__(self, layers: int = 4, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.into = nn.Linear(SIZE, SIZE)
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.out = nn.Linear(SIZE, 3)

    def features(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x).square().mean()


class Chain(nn.Module):
    """A Sequential of plain layers with parameterless ones between."""

    def __init__(self) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for _ in range(4):
            parts += [nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Dropout(0.1)]
        self.net = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


class Recurrent(nn.Module):
    def __init__(self, before: int, behind: int) -> None:
        super().__init__()
        self.cell = nn.GRU(before, behind, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Scale(nn.Module):
    """Parameters without dimensions or elements, one that lies transposed, and one that backward does not need."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, size))
        self.mixing = nn.Parameter(torch.randn(size, size).mul(0.2).t())
        self.shift = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale) @ self.mixing + self.shift + self.empty.sum()


class Shift(nn.Module):
    """Needs nothing of its weight in the backward pass: it first shows there by its gradient."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Mixed(nn.Module):
    """Layers of different sizes and kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Linear(SIZE, 24),
                Block(24),
                Shift(24),
                Recurrent(24, 20),
                Scale(20),
                nn.Linear(20, SIZE, bias=False),
                Block(SIZE),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Structured(nn.Module):
    """Layers that return tuples and dictionaries, and take them."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(SIZE, SIZE)
            self.other = nn.Linear(SIZE, SIZE)

        def forward(self, state: dict[str, Any], *, extra: tuple[Tensor, int]) -> tuple[dict[str, Any], Tensor]:
            x = torch.tanh(self.one(state["x"]) + extra[0])
            return {"x": x, "seen": [*state["seen"], self.other(x)]}, x.mean() * extra[1]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        state: dict[str, Any] = {"x": x, "seen": []}
        loss = torch.zeros(())
        for layer in self.layers:
            state, term = layer(state, extra=(x, 2))
            loss = loss + term
        return loss + sum(seen.square().mean() for seen in state["seen"])


class Cache:
    """A key-value cache as a model's own code writes one: layers append to it, also in training."""

    def __init__(self) -> None:
        self.keys: dict[int, list[Tensor]] = {}
        self.calls = 0

    def update(self, layer: int, key: Tensor) -> Tensor:
        self.calls += 1
        self.keys.setdefault(layer, []).append(key)
        return torch.cat(self.keys[layer], dim=1)


class Attention(nn.Module):
    """Attention with a mask, rotary angles and a cache, all handed to it by keyword."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(SIZE)
        self.query, self.key, self.value = (nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        states: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        y = self.norm(x)
        source = y if states is None else states
        query, key, value = self.query(y), self.key(source), self.value(source)
        if rotary is not None:
            cos, sin = rotary
            query, key = (t * cos + t.flip(-1) * sin for t in (query, key))
        if cache is not None:
            key, value = cache.update(self.number, key), cache.update(self.number + 1000, value)
        scores = query @ key.transpose(1, 2) / SIZE**0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e4)
        return x + scores.softmax(-1) @ value


class Decoder(nn.Module):
    """Tied word embeddings, rotary angles from a buffer, a causal mask, and a cache that training fills."""

    mask: Tensor
    angles: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, SIZE)
        self.layers = nn.ModuleList(Attention(i) for i in range(4))
        self.head = nn.Linear(SIZE, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
        self.register_buffer("angles", torch.randn(LENGTH, SIZE))

    def forward(self, ids: Tensor) -> Tensor:
        x, cache = self.words(ids), Cache()
        rotary = (self.angles.cos(), self.angles.sin())
        for layer in self.layers:
            x = layer(x, mask=self.mask, rotary=rotary, cache=cache)
        assert cache.calls == 2 * len(self.layers), "layers must fill the cache that they were given"
        assert all([len(key) for key in keys] == [len(ids)] for keys in cache.keys.values())
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(-1, 1).flatten())


class EncoderDecoder(nn.Module):
    """Two rows of layers; the second attends to the first one's states, which every layer takes by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, SIZE)
        self.encoder = nn.ModuleList(Attention(i) for i in range(3))
        self.decoder = nn.ModuleList(Attention(i) for i in range(3))
        self.head = nn.Linear(SIZE, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        states = self.words(ids)
        for layer in self.encoder:
            states = layer(states)
        x = self.words(ids.roll(1, 1))
        for layer in self.decoder:
            x = layer(x, states=states)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Experts(nn.Module):
    """A mixture of experts, one a word: in most batches some get nothing, and their gradient is None."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(SIZE, 8)
        self.experts = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, None])
        return x + out.view_as(x)


class Normed(nn.Module):
    """BatchNorm, whose running statistics each forward pass moves on once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.norm = nn.BatchNorm1d(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2).tanh()


class Stateful(nn.Module):
    """A power iteration in a buffer, as in spectral normalisation: the output depends on the buffer's new value."""

    vector: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.register_buffer("vector", F.normalize(torch.randn(SIZE), dim=0))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        if self.training:
            with torch.no_grad():
                self.vector = F.normalize(weight @ (weight.t() @ self.vector), dim=0)
                self.count += 1
        norm = self.vector @ weight @ (weight.t() @ self.vector)
        return x + torch.tanh(F.linear(x, weight / norm, self.linear.bias))


class Counting(nn.Module):
    """State in plain attributes: a number that the output depends on, and a list that the forward pass appends to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        return x + torch.tanh(self.linear(x)) / self.calls


class Spectral(Block):
    """torch's own parametrisations."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.up)
        nn.utils.parametrizations.weight_norm(self.down)


class Looped(Residual):
    """Every layer runs twice in one forward pass."""

    def features(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return self.out(x)


class Skipping(Residual):
    """Outputs of early layers go to late ones, as in a U-Net, and one layer's output goes nowhere."""

    def features(self, x: Tensor) -> Tensor:
        x = self.into(x)
        kept = []
        for number, layer in enumerate(self.layers):
            kept.append(layer(x))
            if number != 1:
                x = kept[-1] + sum(kept[:1])
        return self.out(x)


class Shared(Residual):
    """Two layers share a parameter, which therefore is a root parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].down.weight = self.layers[0].down.weight  # type: ignore[union-attr, assignment]


class Lending(Residual):
    """Two layers share a module, another is the head's too, and one has nothing of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].down = self.layers[0].down
        self.layers[1] = nn.Sequential(self.layers[0].up, nn.GELU(), self.layers[0].down)
        self.out = self.layers[3].up

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x).square().mean()


class Frozen(Residual):
    """A frozen embedding, a frozen first and third layer, and one frozen parameter."""

    def __init__(self) -> None:
        super().__init__(layers=5)
        for module in (self.into, self.layers[0], self.layers[2]):
            module.requires_grad_(False)
        self.layers[3].up.bias.requires_grad_(False)  # type: ignore[union-attr]


class TorchEncoder(nn.Module):
    """torch's own transformer layers, which take a shortcut in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(SIZE, 2, 2 * SIZE, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x).square().mean()


def numbers(steps: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SAMPLES, LENGTH, SIZE, generator=generator) for _ in range(steps)]


def words(steps: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator) for _ in range(steps)]


@dataclass(frozen=True)
class Kind:
    """One kind of model: how it is built, what it is fed, and how ``offload`` must be helped to find its layers."""

    build: Callable[[], nn.Module]
    batches: Callable[[int], list[Tensor]] = numbers
    layers: str | Sequence[str] | None = None


KINDS = {
    "residual": Kind(Residual),
    "chain": Kind(Chain),
    "mixed": Kind(Mixed, layers="layers"),
    "structured": Kind(Structured),
    "decoder": Kind(Decoder, words),
    "encoder_decoder": Kind(EncoderDecoder, words),
    "experts": Kind(lambda: Residual(block=Experts)),
    "normed": Kind(lambda: Residual(block=Normed)),
    "stateful": Kind(lambda: Residual(block=Stateful)),
    "counting": Kind(lambda: Residual(block=Counting)),
    "spectral": Kind(lambda: Residual(block=Spectral)),
    "looped": Kind(Looped),
    "skipping": Kind(Skipping),
    "shared": Kind(Shared),
    "lending": Kind(Lending),
    "frozen": Kind(Frozen),
    "torch_encoder": Kind(TorchEncoder),
}

ADAMW = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}
"""Steps that are seen, and an eps that keeps Adam from amplifying the rounding of gradients near zero."""

Loop = Callable[[nn.Module, Any, list[Tensor]], Any]


def ordinary_loop(model: nn.Module, optimizer: Any, batches: list[Tensor]) -> list[Tensor]:
    losses = []
    for batch in batches:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def pair(build: Callable[[], nn.Module], **offload: Any) -> tuple[nn.Module, nn.Module]:
    """Builds a model twice alike, and offloads the second."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(build())
    settings = {"device": "cpu", "window": 2, **offload}
    return models[0], stronghold.offload(models[1], **settings)


def follow(
    build: Callable[[], nn.Module],
    batches: list[Tensor],
    loop: Loop = ordinary_loop,
    *,
    groups: Callable[[nn.Module], Any] = lambda model: model.parameters(),
    adamw: dict[str, Any] = ADAMW,
    ours_only: dict[str, Any] | None = None,
    **offload: Any,
) -> tuple[nn.Module, Any]:
    """Runs ``loop`` with plain PyTorch and with us, compares all it leaves behind, and returns our model and optimizer.

    ``ours_only`` are settings that torch.optim.AdamW lacks.
    """
    plain, ours = pair(build, **offload)
    expected_optimizer = torch.optim.AdamW(groups(plain), **adamw)
    optimizer = stronghold.AdamW(groups(ours), **adamw, **(ours_only or {}))
    torch.manual_seed(7)
    expected = loop(plain, expected_optimizer, batches)
    torch.manual_seed(7)
    got = loop(ours, optimizer, batches)
    assert_close(got, expected)
    assert_same_models(ours, plain)
    assert_same_states(optimizer, expected_optimizer)
    return ours, optimizer


def assert_close(got: Any, expected: Any, where: str = "result", **tolerance: float) -> None:
    """Compares nested results element by element; NaN equals NaN."""
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor), where
        tolerance = tolerance or {"rtol": 1e-4, "atol": 2e-5}
        torch.testing.assert_close(got, expected, equal_nan=True, msg=lambda m: f"{where}: {m}", **tolerance)
    elif isinstance(expected, dict):
        assert list(got) == list(expected), where
        for key, item in expected.items():
            assert_close(got[key], item, f"{where}[{key!r}]", **tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), where
        for number, item in enumerate(expected):
            assert_close(got[number], item, f"{where}[{number}]", **tolerance)
    elif isinstance(expected, float):
        assert abs(got - expected) <= 1e-5 * max(abs(expected), 1e-5) or (got != got and expected != expected), where
    else:
        assert got == expected, where


def assert_same_models(ours: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    """Compares parameters, buffers, and which parameters have gradients and which."""
    assert_close(dict(ours.state_dict()), dict(plain.state_dict()), "state_dict", **tolerance)
    theirs = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        assert (parameter.grad is None) == (theirs[name].grad is None), f"gradient of {name}"
        if parameter.grad is not None:
            assert_close(parameter.grad, theirs[name].grad, f"gradient of {name}", **tolerance)


def assert_same_states(optimizer: Any, expected: Any, **tolerance: float) -> None:
    """Compares the steps and moments, and for which parameters there are any."""
    got, want = optimizer.state_dict()["state"], expected.state_dict()["state"]
    assert_close({k: got[k] for k in sorted(got)}, {k: want[k] for k in sorted(want)}, "state", **tolerance)


def snapshot(model: nn.Module, optimizer: Any = None) -> dict[str, Any]:
    """Copies all that a refused call must leave alone."""
    kept: dict[str, Any] = {
        "model": {name: value.detach().clone() for name, value in model.state_dict().items()},
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
    }
    if optimizer is not None:
        kept["optimizer"] = copy.deepcopy(optimizer.state_dict())
    return kept


def assert_unchanged(before: dict[str, Any], model: nn.Module, optimizer: Any = None) -> None:
    assert_close(snapshot(model, optimizer), before, "state", rtol=0.0, atol=0.0)
