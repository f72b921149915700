"""What operators sustain that the bytes they move bound, in a device's cache and out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from stronghold.probing.caches import all_cache_bytes, cache_bytes
from stronghold.probing.operator_speed import dtype_name
from stronghold.probing.rounds import Key, Measure, Sample
from stronghold.probing.stopwatches import DeviceClock

MOST_BYTES = 2**29
"""That an operator moves which is measured out of caches."""


def memory_measures(clock: DeviceClock, dtypes: Sequence[torch.dtype]) -> list[Measure]:
    """Returns what is to be measured in ``dtypes``."""
    device = clock.device.torch_device
    cached_bytes = cache_bytes(device)
    uncached_bytes = min(max(4 * cached_bytes, 2 * all_cache_bytes(device)), MOST_BYTES)
    large, small = (max(4096, size // 4096 * 4096) for size in (uncached_bytes, cached_bytes // 4))
    measures = []
    for dtype in dtypes:
        name = dtype_name(dtype)
        measures += [
            Measure(f"elementwise operators in {name}", _simple(clock, dtype, "elementwise", large)),
            Measure(f"elementwise operators in {name}", _simple(clock, dtype, "cached", small)),
            Measure(f"transcendental operators in {name}", _transcendental(clock, dtype, large)),
        ]
    return measures


def _simple(clock: DeviceClock, dtype: torch.dtype, kind: str, moved_bytes: int) -> Sample:
    """Sums, products and copies, the first two of which move three tensors and the last two."""
    elements = moved_bytes // 3 // dtype.itemsize
    one, other = torch.full((2, elements), 0.5, dtype=dtype, device=clock.device.torch_device)

    def task() -> None:
        torch.add(one, other)
        torch.mul(one, other)
        one.clone()

    def sample() -> Mapping[Key, float]:
        return {(kind, dtype_name(dtype)): 8 * elements * dtype.itemsize / clock.timed(task)}

    return sample


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "norm": lambda given: F.layer_norm(given, given.shape[-1:], torch.ones_like(given[0])),
    "softmax": lambda given: F.softmax(given, -1),
}
"""By what is in the names of their operators."""


def _transcendental(clock: DeviceClock, dtype: torch.dtype, moved_bytes: int) -> Sample:
    """Activations, a normalisation and a softmax, both ways: each by itself, and as a mean."""
    width, device = 1024, clock.device.torch_device
    rows = max(1, moved_bytes // 2 // dtype.itemsize // width)
    x = torch.linspace(-4, 4, rows * width, device=device).to(dtype).view(rows, width).requires_grad_()
    gradient, name = torch.ones_like(x), dtype_name(dtype)

    def sample() -> Mapping[Key, float]:
        found: dict[Key, float] = {}
        whole_s = 0.0
        for function, call in FUNCTIONS.items():
            with torch.enable_grad():
                out = call(x)
                forward_s = clock.timed(lambda: call(x), calls=1)  # noqa: B023
                backward_s = clock.timed(lambda: torch.autograd.grad(out, x, gradient, retain_graph=True), calls=1)  # noqa: B023
            found["transcendental", f"{name} {function}"] = 2 * x.nbytes / forward_s
            found["transcendental", f"{name} {function} backward"] = 3 * x.nbytes / backward_s
            whole_s += forward_s + backward_s
        return {**found, ("transcendental", name): 5 * len(FUNCTIONS) * x.nbytes / whole_s}

    return sample
