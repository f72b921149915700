"""What runs in each process of a test in which FSDP trains, saves and loads. Holds no tests."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from tests.small import Residual, numbers

STEPS = 3


def parts(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(parts(model), lr=1e-2, betas=(0.85, 0.99))


def plain() -> Residual:
    torch.manual_seed(0)
    return Residual(block=lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh()))  # without dropout


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> list[float]:
    losses = []
    for batch in batches:
        loss: Tensor = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_save_and_load(saved: str, ours: str) -> list[list[float]]:
    """Trains in shards and saves; then loads what we have saved. Returns the losses behind either."""
    dist.init_process_group("gloo")
    batches = numbers(2 * STEPS)
    model = plain()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = adamw(model)
    train(model, optimizer, batches[:STEPS])
    losses = []
    for folder, write in ((saved, True), (ours, False)):
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        if write:
            dcp.save(copy.copy(state), checkpoint_id=folder)
        else:
            dcp.load(state, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        losses.append(train(model, optimizer, batches[STEPS:]))
    dist.destroy_process_group()
    return losses
