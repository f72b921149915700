"""What matrix products and attention sustain on a device, forward and backward, at several sizes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stronghold import native
from stronghold.planner.machine_file import Attention, Product
from stronghold.probing.caches import all_cache_bytes
from stronghold.probing.rounds import Key, Measure, Sample, Sampled
from stronghold.probing.stopwatches import DeviceClock

DTYPES = (torch.float32, torch.bfloat16)
POOL_BYTES = 96 * 2**20
"""Weights of products are taken from so many bytes in turn, or from more than what one takes, or caches hold."""
LONGEST_S = 0.5
"""Sizes of which one call takes longer are left out, but for the smallest."""
MOST_MEMORY = 1 / 8
"""And of which one product takes a larger part of the device's free memory."""
_HOST = (
    (16, 64, 256, 1024, 4096),
    ((256, 256), (256, 1024), (1024, 256), (1024, 1024), (4096, 1024), (1024, 4096)),
    5e9,
)
_ACCELERATOR = (
    (64, 512, 4096, 16384),
    ((1024, 1024), (1024, 4096), (4096, 1024), (4096, 4096), (16384, 4096), (4096, 16384)),
    3e12,
)
"""Rows, (columns, inner dimension), and the most operations of a product that is measured."""
_HOST_ATTENTION = (
    (8, 4, 64, 64),
    (8, 4, 128, 64),
    (8, 4, 256, 64),
    (2, 8, 256, 128),
    (2, 8, 1024, 64),
    (1, 8, 1024, 128),
)
_ACCELERATOR_ATTENTION = ((8, 16, 512, 64), (8, 16, 1024, 128), (8, 32, 2048, 64), (2, 32, 4096, 128))
"""Batch, heads, tokens and head size. PyTorch on a processor cuts queries otherwise from 192 tokens on, whose backward
pass in bf16 is then twice as fast."""


class ProductSize(NamedTuple):
    """A product of m x k by k x n: of activations and weights, or of two activations: a gradient of weights."""

    m: int
    n: int
    k: int
    of_weights: bool

    @property
    def operations(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def numbers(self) -> int:
        """What a product reads and writes."""
        return self.m * self.k + self.k * self.n + self.m * self.n


def product_sizes(*, is_host: bool) -> list[ProductSize]:
    """Returns the products to measure, the smallest first.

    Of a linear layer over m rows of k numbers each, the forward product is (m, n, k), that of its input's gradient
    (m, k, n), and that of its weight's gradient (n, k, m).
    """
    rows, others, most = _HOST if is_host else _ACCELERATOR
    sizes = [ProductSize(m, n, k, True) for m, (n, k) in itertools.product(rows, others)]
    sizes += [ProductSize(n, k, m, False) for m, (n, k) in itertools.product(rows, others) if n >= k]
    return sorted((size for size in sizes if size.operations <= most), key=lambda size: size.operations)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Products:
    """Products as a linear layer has them. What is a weight or its gradient is in no cache, as in a model."""

    def __init__(self, clock: DeviceClock, dtype: torch.dtype, sizes: Sequence[ProductSize]) -> None:
        self._clock, self._dtype, self._sizes = clock, dtype, sizes
        device = clock.device.torch_device
        most = max(_pooled(size) for size in sizes)
        pooled_bytes = max(POOL_BYTES, min(2 * all_cache_bytes(device), native.host_bytes() // 16))
        self._weights = _random(max(pooled_bytes // dtype.itemsize, most), dtype, device)
        self._one_given = _random(max(m * k for m, _, k, _ in sizes), dtype, device)
        self._other = _random(max(k * n for _, n, k, of_weights in sizes if not of_weights), dtype, device)

    def measures(self) -> list[Measure]:
        name = dtype_name(self._dtype)
        return [Measure(f"matrix products in {name}", self._one(size)) for size in self._sizes]

    def _one(self, size: ProductSize) -> Sample:
        m, n, k, of_weights = size
        one = self._one_given[: m * k]
        count = _pooled(size)
        pool = itertools.cycle(list(self._weights.split(count))[: self._weights.numel() // count])

        def forward_and_back() -> None:
            torch.mm(one.view(m, k), next(pool).view(n, k).t())
            torch.mm(one.view(m, k), next(pool).view(k, n))

        def of_gradient() -> None:
            for _ in range(2):
                torch.mm(one.view(k, m).t(), self._other[: k * n].view(k, n), out=next(pool).view(m, n))

        task = forward_and_back if of_weights else of_gradient

        def sample() -> Mapping[Key, float]:
            return {("matmul", dtype_name(self._dtype), (m, n, k)): 2 * size.operations / self._clock.timed(task)}

        return sample


def _pooled(size: ProductSize) -> int:
    """Returns the numbers of what is taken from the pool: a weight, or its gradient."""
    m, n, k, of_weights = size
    return n * k if of_weights else m * n


class Attentions:
    """Scaled dot-product attention under a causal mask."""

    def __init__(self, clock: DeviceClock, dtype: torch.dtype, *, is_host: bool) -> None:
        self._clock, self._dtype = clock, dtype
        self.sizes = _HOST_ATTENTION if is_host else _ACCELERATOR_ATTENTION

    def measures(self) -> list[Measure]:
        name = dtype_name(self._dtype)
        return [Measure(f"attention in {name}", self._one(*size)) for size in self.sizes]

    def _one(self, batch: int, heads: int, tokens: int, head_size: int) -> Sample:
        device = self._clock.device.torch_device
        values = _random(batch * tokens * 3 * heads * head_size, self._dtype, device)
        # As a layer has them: of one product's output, with the heads side by side.
        split = values.view(batch, tokens, 3, heads, head_size).permute(2, 0, 3, 1, 4)
        given = query, key, value = [one.detach().requires_grad_() for one in split]
        gradient = torch.ones(batch, tokens, heads, head_size, dtype=self._dtype, device=device).transpose(1, 2)
        operations = batch * heads * tokens * tokens * head_size

        def forward() -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        out = forward()

        def backward() -> None:
            torch.autograd.grad(out, given, gradient, retain_graph=True)

        def sample() -> Mapping[Key, float]:
            name, sizes = dtype_name(self._dtype), (batch, heads, tokens, tokens, head_size)
            with torch.enable_grad():
                forward_s, backward_s = self._clock.timed(forward), self._clock.timed(backward)
            return {
                ("attention", name, sizes): 4 * operations / forward_s,
                ("backward", name, sizes): 10 * operations / backward_s,
            }

        return sample


def operator_measures(clock: DeviceClock, dtypes: Sequence[torch.dtype]) -> list[Measure]:
    """Returns what is to be measured of products and attention in ``dtypes``."""
    is_host, measures = clock.device.is_host, list[Measure]()
    for dtype in dtypes:
        sizes = _within_reach(clock, dtype, product_sizes(is_host=is_host))
        measures += Products(clock, dtype, sizes).measures()
        measures += Attentions(clock, dtype, is_host=is_host).measures()
    return measures


def products_of(samples: Sampled) -> list[Product]:
    return [Product(key[1], key[2], samples.spread(key)) for key in samples if key[0] == "matmul"]


def attention_of(samples: Sampled) -> list[Attention]:
    return [
        Attention(key[1], key[2], samples.spread(key), samples.spread(("backward", *key[1:])))
        for key in samples
        if key[0] == "attention"
    ]


def _within_reach(clock: DeviceClock, dtype: torch.dtype, sizes: Sequence[ProductSize]) -> list[ProductSize]:
    """Returns the sizes of which a product takes less than LONGEST_S and MOST_MEMORY, and each kind's smallest."""
    device, free_bytes = clock.device.torch_device, clock.device.free_bytes()
    smallest = [next(size for size in sizes if size.of_weights is kind) for kind in (True, False)]
    if free_bytes is not None:
        room = MOST_MEMORY * free_bytes / dtype.itemsize
        sizes = [size for size in sizes if size.numbers <= room or size in smallest]
    most = sizes[-1].operations
    for m, n, k, _ in sizes:
        one, other = (torch.ones(shape, dtype=dtype, device=device) for shape in ((m, k), (k, n)))
        # The first call may look for kernels.
        taken_s = min(clock.timed(lambda: torch.mm(one, other), calls=1) for _ in range(2))  # noqa: B023
        if taken_s > LONGEST_S:
            most = 2 * m * n * k - 1
            break
    return [size for size in sizes if size.operations <= most or size in smallest]


def _random(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns normal numbers, a block of them again and again: of zeros products would take less power."""
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(min(count, 2**20), generator=generator, device="cpu").to(dtype).to(device)
    return block.repeat(-(-count // block.numel()))[:count]
