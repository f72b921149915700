"""What a model can be trained by: one file each, one shared protocol."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from stronghold.config import TrainSettings
from stronghold.evaluation.report import Report
from stronghold.weights import Weights

METHODS = {"stronghold": "stronghold.methods.stronghold:Stronghold"}
"""Every method's name and class. A method's module is imported when it is asked for, and not before."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A model ready for the ordinary loop: forward on ``device``, backward, ``optimizer.step()``.

    ``optimizer`` clips and decays as the settings say. ``report`` may be called after any step.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    report: Callable[[], Report]
    device: torch.device


class Method(Protocol):
    """A way to train models; ``prepare`` may change the model in place."""

    name: str

    def prepare(self, model: nn.Module, settings: TrainSettings, weights: Weights | None = None) -> Prepared:
        """Returns ``model`` and its optimizer as this method trains them.

        ``weights`` gives the values of a model on the meta device, as in ``stronghold.offload``; a method that needs
        the model whole calls ``stronghold.weights.fill(model, weights)``. Raises ValueError or StrongholdError for
        settings that it cannot keep, before anything is trained.
        """


def find_method(name: str) -> Method:
    """Returns the method called ``name``. Raises ValueError for any other name."""
    if name not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)} (got {name!r}); pass one of them")
    module, _, cls = METHODS[name].partition(":")
    method: Method = getattr(importlib.import_module(module), cls)()
    return method


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns parameter groups in which only matrices, and what has more dimensions, decay.

    Frozen parameters are in neither; an empty group is left out.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
