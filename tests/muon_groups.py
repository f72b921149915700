"""Which parameters Muon steps, and which AdamW, in the tests of Muon. Needs PyTorch alone. Holds no tests."""

from __future__ import annotations

from typing import Any

from torch import nn

MUON: dict[str, Any] = {"lr": 2e-3, "weight_decay": 0.1}
ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}


def split_up(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns the matrices between the layers' norms, and the rest: embeddings, heads, vectors."""
    root = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    inner = [(name, p) for name, p in model.named_parameters() if p.ndim == 2 and id(p) not in root]
    matrices = [p for name, p in inner if "head" not in name and "decoder.weight" not in name]
    own = set(map(id, matrices))
    return matrices, [p for p in model.parameters() if id(p) not in own]


def groups(model: nn.Module, **muon: Any) -> list[dict[str, Any]]:
    matrices, rest = split_up(model)
    return [{"params": matrices, **MUON, **muon}, {"params": rest, "use_muon": False, **ADAMW}]
