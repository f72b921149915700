"""What runs in each process of a test of checkpoints of stages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import stronghold
from stronghold.checkpoint import dcp_saving
from stronghold.checkpoint.unit_tensors import names_of, tensors_of
from stronghold.distributed import Processes, in_stages, watch
from stronghold.lab.models.gpt import GPT
from stronghold.lab.models.layered_gpt import LayeredGPT
from tests.distributed.cases import CONFIG, batches
from tests.distributed.faulty import FAULTS

LAYOUTS: dict[str, dict[str, Any]] = {
    "two": {"stages": 2, "balance": [3, 2], "window": 1},
    "uneven": {"stages": 2, "balance": [1, 4], "window": 2},
    "interleaved": {"stages": 4, "balance": "layers", "window": 1},
    "replicas": {"stages": 1, "replicas": 2, "balance": "layers", "window": 1},
}
SAVED = ("two", "replicas")
"""The layouts that are saved; all of them load what each of these has saved."""


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def state_of(model: nn.Module, optimizer: stronghold.AdamW) -> dict[str, Tensor]:
    """Returns everything that is kept of each parameter: its master, its moments and its step."""
    found = {}
    for unit, names in names_of(model).items():
        found.update({name: value.clone() for name, value in tensors_of(unit, names, optimizer.state).items()})
        for name, parameter in zip(names, unit.parameters, strict=True):
            found[f"{name}/step"] = optimizer.state[parameter]["step"].clone()
    return found


def in_layout(layout: str, states: str, dtype: torch.dtype | None = None) -> tuple[nn.Module, stronghold.AdamW]:
    settings = dict(LAYOUTS[layout])
    processes = Processes(torch.device("cpu"), wanted=2, replicas=settings.pop("replicas", 1))
    model = in_stages(LayeredGPT(gpt()), processes, micro_batches=4, dtype=dtype, **settings)
    return model, optimizer_of(model, states)


def optimizer_of(model: nn.Module, states: str) -> stronghold.AdamW:
    """Returns AdamW with moments in ``states``; of ``"muon"`` Muon for the layers' matrices, and AdamW for the rest."""
    if states != "muon":
        return stronghold.AdamW(groups(model), lr=1e-3, states=states)
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embedding" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embedding" in name]
    return stronghold.Muon([{"params": matrices}, {"params": others, "use_muon": False, "lr": 1e-3}], lr=2e-3)


def train(model: nn.Module, optimizer: stronghold.AdamW, steps: slice) -> list[float]:
    losses = []
    for batch in batches(6)[steps]:
        if hasattr(model, "forward_backward"):
            loss = model.forward_backward(batch, batch)
        else:
            loss = model(batch, batch).loss
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def save_and_load(folder: str, states: str, format: Any) -> dict[str, Any]:
    """Saves in several layouts, loads in all what they and one process have saved; returns what each then held."""
    dtype = torch.bfloat16 if states == "8bit" else None
    found: dict[str, Any] = {}
    extra = {"position": 3}
    for layout in SAVED:
        model, optimizer = in_layout(layout, states, dtype)
        train(model, optimizer, slice(0, 3))
        stronghold.checkpoint.save(Path(folder) / layout, model, optimizer, extra=extra, format=format)
        found[f"{layout} saved"] = state_of(model, optimizer)
        found[f"{layout} losses"] = train(model, optimizer, slice(3, 6))
    for layout in LAYOUTS:
        model, optimizer = in_layout(layout, states, dtype)
        for source in (*SAVED, "alone"):
            assert stronghold.checkpoint.load(Path(folder) / source, model, optimizer, format=format) == extra
            found[f"{layout} of {source}"] = state_of(model, optimizer)
            # Of those that are compared each step; of the others one, so that the next load finds something else.
            found[f"{layout} of {source}, losses"] = train(model, optimizer, slice(3, 6 if layout == source else 4))
    return found


def save_with_fault(folder: str, fault: str) -> None:
    """Saves by torch.distributed.checkpoint; ``fault`` befalls process 1 when it has written its first tensor."""
    watch.BEAT_S, watch.LOST_S, watch.STUCK_S = 0.5, 6.0, 4.0
    model, optimizer = in_layout("two", "fp32")
    train(model, optimizer, slice(0, 1))
    if os.environ["RANK"] == "1":
        lookup, looked = dcp_saving._SavePlanner.lookup_object, []

        def faulty(planner: Any, index: Any) -> Any:
            looked.append(index)
            if len(looked) == 2:
                FAULTS[fault]()
            return lookup(planner, index)

        dcp_saving._SavePlanner.lookup_object = faulty  # type: ignore[method-assign]
    stronghold.checkpoint.save(Path(folder) / "saved", model, optimizer, format="dcp")
