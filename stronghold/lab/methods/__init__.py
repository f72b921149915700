"""What a model can be trained by: one file each, one shared protocol."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from stronghold.device import Timeline
from stronghold.lab.models.files import inputs_of
from stronghold.lab.settings import TrainSettings
from stronghold.reports import Measured, Report
from stronghold.weights import Weights

if TYPE_CHECKING:  # it draws tables, which to train does without
    from stronghold.lab.records.stages_report import StagesReport

METHODS = {
    "stronghold": "stronghold.lab.methods.stronghold:Stronghold",
    "megatron-lm": "stronghold.lab.methods.megatron_lm:MegatronLM",
    "megatron-lm-exact": "stronghold.lab.methods.megatron_lm_exact:MegatronLMExact",
    "l2l": "stronghold.lab.methods.l2l:L2L",
    "zero-offload": "stronghold.lab.methods.zero_offload:ZeroOffload",
    "zero-infinity": "stronghold.lab.methods.zero_infinity:ZeroInfinity",
    "zero-infinity-nvme": "stronghold.lab.methods.zero_infinity_nvme:ZeroInfinityNvme",
    "fsdp-offload": "stronghold.lab.methods.fsdp_offload:FsdpOffload",
    "torchao-offload": "stronghold.lab.methods.torchao_offload:TorchaoOffload",
}
"""Every method's name and class. A method's module is imported when it is asked for, and not before."""

ON_DISK = ("stronghold", "zero-infinity-nvme")
"""Those that take a store on disk."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A model ready to train: ``loss``, ``backward``, ``step``, as often as wanted.

    ``optimizer`` is the one whose rate a schedule sets. ``step`` clips all gradients to ``max_grad_norm``; it is None
    where the optimizer clips by itself, or nobody does. ``report`` may be called after any step. ``saves`` tells that
    the model can be saved, ``packages`` what trains beside PyTorch. ``trace`` records a timeline, where that is known.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    report: Callable[[], Report | Measured | StagesReport]
    device: torch.device
    max_grad_norm: float | None = None
    saves: bool = False
    packages: tuple[str, ...] = ()
    trace: Callable[[], AbstractContextManager[Timeline]] | None = None

    def loss(self, batch: Tensor) -> Tensor:
        """Returns the mean loss of ``batch``, int64 (batch, sequence)."""
        loss: Tensor = self.model(**inputs_of(self.model, batch.to(self.device))).loss
        return loss

    def backward(self, loss: Tensor) -> None:
        """Computes the gradients of what ``loss`` returned."""
        loss.backward()

    def agreed(self, stop: bool) -> bool:
        """Whether this process, or another that trains the same model, is to ``stop``."""
        return stop

    def step(self) -> None:
        """Clips, updates, and frees the gradients. Raises RuntimeError for a norm that is not finite."""
        self.clip(self.model.parameters())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clip(self, parameters: Iterable[Tensor]) -> None:
        """Clips their gradients, if they are to be. Raises RuntimeError for a norm that is not finite."""
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.max_grad_norm, error_if_nonfinite=True)


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
