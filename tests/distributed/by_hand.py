"""What processes compute that each offload a model, and add up the gradients by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

import stronghold
from tests.distributed.cases import residual

REDUCTIONS: dict[str, Callable[[Sequence[Tensor]], object]] = {
    "all_reduce": lambda gradients: [dist.all_reduce(one) for one in gradients],
    "coalesced": lambda gradients: dist.all_reduce_coalesced(gradients),
    "reduce and broadcast": lambda gradients: [(dist.reduce(one, 0), dist.broadcast(one, 0)) for one in gradients],
}
STEPS, PASSES = 3, 2


def averaged() -> dict[str, tuple[bool, float]]:
    """Trains models with gradients that the processes have reduced and clipped, and others in plain PyTorch.

    Returns, for each way, whether the processes have the same bits, and how far the two are apart at the most.
    """
    dist.init_process_group("gloo")
    found = {}
    for name, reduce in REDUCTIONS.items():
        for dtype in (torch.float32, torch.bfloat16):
            plain = _trained(reduce, dtype, resident=None)
            for resident in (0, 3):
                ours = _trained(reduce, dtype, resident=resident)
                theirs = ours.clone()
                dist.broadcast(theirs, 0)
                apart = (ours - plain).abs().max().item()
                found[f"{name}, {dtype}, {resident} resident"] = torch.equal(theirs, ours), apart
    dist.destroy_process_group()
    return found


def _trained(reduce: Callable[[Sequence[Tensor]], object], dtype: torch.dtype, *, resident: int | None) -> Tensor:
    """Returns all weights, in one row; those of plain PyTorch where ``resident`` is None."""
    model = residual().to(dtype)
    if resident is None:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    else:
        stronghold.offload(model, device="cpu", window=1, resident=resident)
        optimizer = stronghold.AdamW(model.parameters(), lr=1e-2, eps=1e-3, max_grad_norm=0.05)
    for step in range(STEPS):
        for number in range(PASSES):
            generator = torch.Generator().manual_seed(10 * (step * PASSES + number) + dist.get_rank())
            x = torch.randn(4, 3, 4, generator=generator).to(dtype)
            (model(x).float().square().mean() / dist.get_world_size()).backward()
        reduce([p.grad for p in model.parameters() if p.grad is not None])
        if resident is None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten().float() for p in model.parameters()])
