"""A training that can stop after any step, of any of the tests' models. Holds no tests."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

import stronghold
from tests.small import KINDS, Kind


class Training:
    """A model, its optimizer and a scheduler; ``steps`` takes one step for each batch and returns the losses."""

    def __init__(self, model: nn.Module, clip: float | None = 0.5, **settings: Any) -> None:
        adamw = {key: settings.pop(key) for key in ("states", "update", "threads") if key in settings}
        self.clip = clip if adamw.get("update") != "in_backward" else None
        self.model = stronghold.offload(model, device="cpu", **settings)
        self.optimize(**adamw)

    def optimize(self, **adamw: Any) -> None:
        """Begins with a new optimizer and scheduler; those before are gone with their states."""
        self.optimizer = self.scheduler = None
        gc.collect()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = stronghold.AdamW(groups, lr=1e-2, eps=1e-4, **adamw)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=1e-2, total_steps=50)

    def steps(self, batches: list[Any]) -> list[float]:
        losses = []
        dtype = next(self.model.parameters()).dtype
        for batch in batches:
            if isinstance(batch, Tensor) and batch.is_floating_point():
                batch = batch.to(dtype)
            loss: Tensor = self.model(**batch).loss if isinstance(batch, dict) else self.model(batch)
            loss.backward()
            losses.append(loss.item())
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return losses

    def save(self, path: Any, **more: Any) -> Any:
        return stronghold.checkpoint.save(path, self.model, self.optimizer, scheduler=self.scheduler, **more)

    def load(self, path: Any, **more: Any) -> Any:
        return stronghold.checkpoint.load(path, self.model, self.optimizer, scheduler=self.scheduler, **more)


def of_kind(name: str = "residual", seed: int = 0, **settings: Any) -> tuple[Training, Kind]:
    """Returns the training of one of the small models, and the kind."""
    kind = KINDS[name]
    torch.manual_seed(seed)
    return Training(kind.build(), **{"layers": kind.layers, "window": 2, **settings}), kind
