"""A model under test, offloaded in one way or plain, with all that a program holds of it."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import stronghold
from tests.fuzz.models import Row, batch
from tests.fuzz.plainly import Plainly
from tests.reference import MasterAdamW, decay_groups

if TYPE_CHECKING:
    from tests.fuzz.programs import Program

LR = 1e-2
OURS = "AdamW"
FOREIGN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=LR, momentum=0.9, foreach=False),
    "sgd foreach": lambda groups: torch.optim.SGD(groups, lr=LR, momentum=0.9, foreach=True),
    "sgd fused": lambda groups: torch.optim.SGD(groups, lr=LR, momentum=0.9, fused=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=LR, foreach=False),
    "adagrad fused": lambda groups: torch.optim.Adagrad(groups, lr=LR, fused=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=LR, eps=1e-4, foreach=False),
    "adamw foreach": lambda groups: torch.optim.AdamW(groups, lr=LR, eps=1e-4, foreach=True),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=LR, eps=1e-4, fused=True),
    "adam amsgrad": lambda groups: torch.optim.Adam(groups, lr=LR, eps=1e-4, amsgrad=True, foreach=True),
}


@dataclass(frozen=True, kw_only=True, repr=False)
class Way(Plainly):
    """One way to offload; windows and resident layers beyond the model's are as many as it has."""

    window: int = 1
    store: str = "ram"
    activations: str = "recompute"
    resident: int = 0
    update: str = "deferred"
    threads: int = 1
    micro_batch: int | None = None


class Skipped(Exception):
    """The offloaded twins refused what comes next, and the plain one does without."""


class Twin:
    """Runs operations: ``way`` says how it is offloaded, None that it is plain."""

    def __init__(self, program: Program, way: Way | None) -> None:
        self.program = program
        self.way = way
        self.losses: list[Tensor] = []
        self.held: list[tuple[str, Any, int]] = []
        self.saved: dict[str, Any] = {}
        self.handles: list[Any] = []
        self.seen: list[Any] = []
        self.scheduler: Any = None
        self.stage = self.stop_at = ""
        self._exits = ExitStack()
        self.folder = Path(self._exits.enter_context(tempfile.TemporaryDirectory(prefix="fuzz-")))
        self._folders = 0
        self.dtype = torch.bfloat16 if program.dtype == "bf16" else torch.float32
        self.name = program.optimizer
        self.model: Any = None
        self.optimizer: Any = None

    def begin(self) -> None:
        """Builds the model and its optimizer."""
        self.model = self.offloaded(self.program.model.build(), self.way)
        self.optimizer = self.optimizer_of(self.name, self.model)

    @property
    def plain(self) -> bool:
        return self.way is None

    def new_folder(self) -> Path:
        self._folders += 1
        return self.folder / str(self._folders)

    def offloaded(self, model: Row, way: Way | None) -> Any:
        if way is None:
            return model
        count = sum(1 for layer in model.layers if next(layer.parameters(), None) is not None)
        store: Any = {"ram": "ram", "disk": self.new_folder(), "disks": [self.new_folder(), self.new_folder()]}[
            way.store
        ]
        return stronghold.offload(
            model,
            window=min(way.window, count),
            store=store,
            device="cpu",
            dtype=self.dtype,
            layers="layers",
            micro_batch=None if "normed" in self.program.model.layers else way.micro_batch,  # its samples go together
            activations=way.activations,
            resident=min(way.resident, count),
        )

    def optimizer_of(self, name: str, model: nn.Module, groups: Any = None, way: Way | None = None) -> Any:
        """Returns the optimizer of a name over ``groups``, by default one of matrices that decay and one of others."""
        program, way = self.program, way or self.way
        if groups is None:
            late = {id(p) for p in self.late(model)}
            groups = decay_groups(model)
            groups = [{**group, "params": [p for p in group["params"] if id(p) not in late]} for group in groups]
        groups = [group for group in groups if group["params"]]
        if name != OURS:
            return FOREIGN[name]([{**group, "weight_decay": 0.0} for group in groups])
        settings: dict[str, Any] = {"lr": LR, "eps": 1e-4}
        if way is not None:
            return stronghold.AdamW(
                groups,
                **settings,
                states=program.states,
                update=way.update,
                threads=way.threads,
                max_grad_norm=program.max_grad_norm,
            )
        if program.dtype == "bf16":
            return MasterAdamW(model, dtype=torch.bfloat16, **settings)
        return torch.optim.AdamW(groups, foreach=False, **settings)

    def late(self, model: Any) -> list[nn.Parameter]:
        """Returns the parameters that no group has at first."""
        return [model.gain, *model.layers[-1].parameters()] if self.program.late else []

    # What operations do.

    def at(self, stage: str) -> None:
        """Tells that an operation comes to a part of it, which the plain twin leaves out if it was refused."""
        if self.stop_at == stage:
            raise Skipped
        self.stage = stage

    def loss(self, number: int, call: int = 0) -> Tensor:
        self.at("forward")
        return self.model(batch(number), call).float().square().mean()

    def backward(self, loss: Tensor, **settings: Any) -> None:
        self.at("backward")
        loss.backward(**settings)

    def step(self) -> None:
        self.at("step")
        if self.plain and self.name == OURS and self.program.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.clipped(), self.program.max_grad_norm, foreach=False)
        self.optimizer.step()

    def clipped(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        set_to_none |= "stacked" in self.program.model.layers  # in place, plain PyTorch adds to each gradient thrice
        set_to_none |= "in_backward" in self.program.updates  # which refuses the other, whatever the program is
        if isinstance(self.optimizer, MasterAdamW):
            self.model.zero_grad(set_to_none)  # its own has no such choice
        else:
            self.optimizer.zero_grad(set_to_none)

    def take_writes(self) -> None:
        """Has the plain twin's masters take over what was written into its bf16 weights."""
        if isinstance(self.optimizer, MasterAdamW):
            self.optimizer.take_writes(1, [])

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())

    def target(self, number: int) -> tuple[str, nn.Parameter]:
        """Returns the parameter of this number, counted round."""
        parameters = self.parameters()
        return parameters[number % len(parameters)]

    def layer(self, number: int) -> nn.Module:
        return self.model.layers[number % len(self.model.layers)]

    def forget(self) -> None:
        """Drops graphs, hooks and whatever else belongs to the model as it is now."""
        for handle in self.handles:
            handle.remove()
        self.losses.clear()
        self.held.clear()
        self.handles.clear()
        self.saved.clear()
        self.scheduler = None

    def replace(self, model: Any, optimizer: Any) -> None:
        """Goes on with another model; the one until now goes, with its files."""
        self.forget()
        self.model, self.optimizer = model, optimizer
        gc.collect()

    def close(self) -> None:
        self.forget()
        self.model = self.optimizer = None
        gc.collect()
        self._exits.close()
