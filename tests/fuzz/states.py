"""Operations on states and settings: state dicts, copies, checkpoints, groups, schedulers, hooks, other optimizers."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import stronghold
from tests.fuzz.models import batch
from tests.fuzz.operation import Operation, gradients
from tests.fuzz.twin import OURS, Twin, Way


def moments(twin: Twin) -> list[dict[str, Any]]:
    """Returns the optimizer's states, in the order of its parameters."""
    states = twin.optimizer.state_dict()["state"]
    return [
        {name: value.clone() if isinstance(value, Tensor) else value for name, value in states[number].items()}
        for number in sorted(states)
        if states[number]
    ]


def values(twin: Twin) -> dict[str, Tensor]:
    """Returns copies of parameters and buffers, without a tensor over their memory."""
    named = [*twin.parameters(), *twin.model.named_buffers()]
    with torch.no_grad():
        return {name: value.clone() for name, value in named}


def _trace(twin: Twin) -> Any:
    if twin.plain:
        return twin.model(batch(1)).detach()
    with stronghold.trace(twin.model) as timeline:
        y = twin.model(batch(1)).detach()
    assert timeline.spans()
    return y


def _report(twin: Twin) -> None:
    if not twin.plain:
        str(stronghold.report(twin.model))


def _verify(twin: Twin) -> None:
    if not twin.plain:
        stronghold.verify(twin.model)


LOOKS: dict[str, Callable[[Twin], Any]] = {
    "values": values,
    "moments": moments,
    "report": _report,
    "verify": _verify,
    "trace": _trace,
    "repr": lambda twin: repr(twin.model),
    "sum": lambda twin: [p.detach().sum() for _, p in twin.parameters()],
    "seen": lambda twin: list(twin.seen),
}


@dataclass(frozen=True, kw_only=True, repr=False)
class Look(Operation):
    what: str = "values"

    def run(self, twin: Twin) -> Any:
        return LOOKS[self.what](twin)


@dataclass(frozen=True, kw_only=True, repr=False)
class Save(Operation):
    """Takes a state dict of the model or of the optimizer, copied."""

    what: str = "model"

    def run(self, twin: Twin) -> Any:
        twin.saved[self.what] = copy.deepcopy(getattr(twin, self.what).state_dict())


@dataclass(frozen=True, kw_only=True, repr=False)
class Load(Operation):
    """Loads the state dict that was saved last."""

    what: str = "model"

    def run(self, twin: Twin) -> Any:
        if (saved := twin.saved.get(self.what)) is not None:
            getattr(twin, self.what).load_state_dict(saved)


@dataclass(frozen=True, kw_only=True, repr=False)
class Copy(Operation):
    """Copies the model, which makes a plain one, and computes with the copy."""

    def run(self, twin: Twin) -> Any:
        copied = copy.deepcopy(twin.model)
        y = copied(batch(0))
        y.float().sum().backward()
        return [y.detach(), {name: value.detach().clone() for name, value in copied.state_dict().items()}]


@dataclass(frozen=True, kw_only=True, repr=False)
class Checkpoint(Operation):
    """Saves everything, and goes on with a new model, offloaded in another way, that loads it."""

    way: Way = field(default_factory=Way)

    def run(self, twin: Twin) -> Any:
        if twin.name != OURS:
            return None
        twin.model.zero_grad()  # also those of parameters that the optimizer has not yet
        if twin.plain:
            twin.replace(twin.model, twin.optimizer)
            return None
        path = twin.new_folder()
        stronghold.checkpoint.save(path, twin.model, twin.optimizer)
        old = twin.model
        names = {id(parameter): name for name, parameter in twin.parameters()}
        grouped = [[names[id(p)] for p in group["params"]] for group in twin.optimizer.param_groups]
        model = twin.program.model.build(seed=1)
        for (_, there), (_, here) in zip(old.named_parameters(), model.named_parameters(), strict=True):
            here.requires_grad_(there.requires_grad)
        for one, other in zip(model.modules(), old.modules(), strict=True):
            one.training = other.training
            one.__dict__.update({key: other.__dict__[key] for key in ("calls", "seen") if key in other.__dict__})
        twin.offloaded(model, self.way)
        found = dict(model.named_parameters())
        groups = [{"params": [found[name] for name in some]} for some in grouped]
        optimizer = twin.optimizer_of(OURS, model, groups, self.way)
        stronghold.checkpoint.load(path, model, optimizer)
        twin.replace(model, optimizer)
        return None


@dataclass(frozen=True, kw_only=True, repr=False)
class Restore(Operation):
    """Saves a checkpoint, or with one there loads it into the same model."""

    def run(self, twin: Twin) -> Any:
        if twin.name != OURS:
            return None
        path, saved = twin.folder / "restored", twin.saved.get("restore")
        twin.zero_grad()
        twin.saved["restore"] = None
        if twin.plain:
            both = twin.model, twin.optimizer
            if saved is None:
                twin.saved["restore"] = [copy.deepcopy(thing.state_dict()) for thing in both]
            else:
                for thing, state in zip(both, saved, strict=True):
                    thing.load_state_dict(state)
        elif saved is None:
            twin.saved["restore"] = stronghold.checkpoint.save(path, twin.model, twin.optimizer)
        else:
            stronghold.checkpoint.load(path, twin.model, twin.optimizer)
        return None


SETTINGS = ("lr", "weight_decay", "betas", "maximize")


@dataclass(frozen=True, kw_only=True, repr=False)
class Group(Operation):
    """Changes a setting of a parameter group."""

    what: str = "lr"
    which: int = 0
    factor: float = 0.5

    def run(self, twin: Twin) -> Any:
        groups = twin.optimizer.param_groups
        group = groups[self.which % len(groups)]
        if self.what == "maximize":
            group["maximize"] = True
        elif self.what in group:
            before = group[self.what]
            group[self.what] = (before[0] * self.factor, before[1]) if self.what == "betas" else before * self.factor


@dataclass(frozen=True, kw_only=True, repr=False)
class AddGroup(Operation):
    """Adds a group of what no group has yet."""

    def run(self, twin: Twin) -> Any:
        known = {id(p) for group in twin.optimizer.param_groups for p in group["params"]}
        if added := [p for p in twin.late(twin.model) if id(p) not in known]:
            twin.scheduler = None  # it knows of the groups before
            if "in_backward" in twin.program.updates:  # which adds to no gradient that is there
                for parameter in added:
                    parameter.grad = None
            twin.optimizer.add_param_group({"params": list(dict.fromkeys(added)), "lr": 0.02})


@dataclass(frozen=True, kw_only=True, repr=False)
class Schedule(Operation):
    """Makes a scheduler, or steps the one there is."""

    def run(self, twin: Twin) -> Any:
        if twin.scheduler is None:
            twin.scheduler = torch.optim.lr_scheduler.LambdaLR(twin.optimizer, lambda step: 1 / (1 + step % 3))
        else:
            twin.scheduler.step()
        return [group["lr"] for group in twin.optimizer.param_groups]


@dataclass(frozen=True, kw_only=True, repr=False)
class Freeze(Operation):
    """Freezes a parameter or a layer, or thaws it."""

    target: int = 0
    whole: bool = False
    on: bool = True

    def run(self, twin: Twin) -> Any:
        thing: Any = twin.layer(self.target) if self.whole else twin.target(self.target)[1]
        thing.requires_grad_(not self.on)


@dataclass(frozen=True, kw_only=True, repr=False)
class Mode(Operation):
    train: bool = False

    def run(self, twin: Twin) -> Any:
        twin.model.train(self.train)


@dataclass(frozen=True, kw_only=True, repr=False)
class To(Operation):
    """Moves the model to where it is; other places are refused."""

    how: str = "cpu"

    def run(self, twin: Twin) -> Any:
        {
            "cpu": lambda: twin.model.to("cpu"),
            "dtype": lambda: twin.model.to(twin.dtype),
            "double": lambda: twin.model.double(),
            "meta": lambda: twin.model.to("meta"),
        }[self.how]()


@dataclass(frozen=True, kw_only=True, repr=False)
class Hook(Operation):
    """Registers a hook of the user's."""

    how: str = "scale"
    target: int = 0

    def run(self, twin: Twin) -> Any:
        name, parameter = twin.target(self.target)
        if not parameter.requires_grad:
            return
        seen = twin.seen

        def note(parameter: Tensor) -> None:
            seen.append((name, None if parameter.grad is None else parameter.grad.detach().clone()))

        def look(module: Any, args: Any, output: Any) -> None:
            seen.append((self.target, module.training))

        if self.how == "scale":
            twin.handles.append(parameter.register_hook(lambda gradient: gradient * 0.5))
        elif self.how == "note":
            twin.handles.append(parameter.register_post_accumulate_grad_hook(note))
        elif self.how == "forward":
            twin.handles.append(twin.layer(self.target).register_forward_hook(look))
        elif self.how == "inner":
            twin.handles.append(twin.layer(self.target).inner.register_forward_hook(look))
        elif twin.handles:
            twin.handles.pop().remove()


@dataclass(frozen=True, kw_only=True, repr=False)
class Switch(Operation):
    """Goes on with another optimizer; the one until now goes."""

    how: str = "sgd"

    def run(self, twin: Twin) -> Any:
        if twin.dtype != torch.float32:
            return
        twin.scheduler = None
        twin.zero_grad()
        twin.saved.pop("optimizer", None)
        twin.saved.pop("restore", None)
        del twin.optimizer
        gc.collect()
        twin.name = self.how
        twin.optimizer = twin.optimizer_of(self.how, twin.model)


def final(twin: Twin, *, gradients_too: bool) -> dict[str, Any]:
    """Returns all that a program leaves behind."""
    left: dict[str, Any] = {"values": values(twin), "moments": moments(twin)}
    if gradients_too:
        left["gradients"] = gradients(twin)
    return left
