"""The first training pass of a model that nobody has made settings for: what was left open is planned then."""

from __future__ import annotations

import inspect
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stronghold.device import drawn_apart
from stronghold.engine.adamw import AdamW
from stronghold.engine.rearranging import NoRoomError, keep_last, rearrange, refused_for
from stronghold.errors import BudgetError
from stronghold.settings import kept_layers
from stronghold.unit import opaque

if TYPE_CHECKING:
    from stronghold.engine.engine import Engine
    from stronghold.engine.planning.first_inputs import FirstPlan

_LOG = logging.getLogger("stronghold")
_STAYS = "%s keeps a window of %d and is not planned for its first batch (%s); pass inputs= to offload()"
LARGER = 1.5
"""Of the first batch, what later ones may have at most for layers to keep their activations: those of twice it fit."""

_waiting: weakref.WeakKeyDictionary[Engine, FirstPass] = weakref.WeakKeyDictionary()


class _NotPlannedError(Exception):
    """Why a model stays as it is."""


class FirstPass:
    """Plans a model for the inputs of its first training pass under ``stronghold.AdamW``, before that.

    Where something stands in the way the model stays as it is, which the log says. Later batches that are much larger
    have all layers computed again, whose activations might not fit. A copy of the model has none of this.
    """

    def __init__(
        self, model: nn.Module, engine: Engine, layers: str | Sequence[str] | None, accumulate: int | None
    ) -> None:
        self._engine = weakref.ref(engine)
        self._layers, self._accumulate = layers, accumulate
        self._kept = self._most = 0
        """The layers that keep their activations, for a batch of so many elements at most."""
        first = engine.blocks[0].module
        self._handles = [
            model.register_forward_pre_hook(_Hook(self._before_first), with_kwargs=True),
            first.register_forward_pre_hook(_Hook(self._before_layer), with_kwargs=True),
        ]

    def _before_first(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (engine := self._ready()) is None:
            return
        with engine.turns.taken():
            if not self._ends(engine):
                return
            try:
                plan = self._plan(model, engine, args, kwargs)
                if (reason := refused_for(engine)) is not None:  # another thread may have done something meanwhile
                    raise _NotPlannedError(reason)
            except (_NotPlannedError, ValueError, BudgetError) as error:
                _LOG.info(_STAYS, engine.kind, engine.window.size, error)
                return
            except Exception as error:  # a probe, or a model on tensors without values, can fail in any way
                cause = f"{type(error).__name__}: {error}"
                warnings.warn(_STAYS % (engine.kind, engine.window.size, cause), RuntimeWarning, stacklevel=2)
                return
            try:
                rearrange(engine, plan.window, plan.resident, plan.activations, plan.steps)
            except NoRoomError as error:
                warnings.warn(
                    f"{engine.kind} was planned for its first batch, but {error}", RuntimeWarning, stacklevel=2
                )
                return
        self._kept = kept_layers(plan.activations, len(engine.layers))
        self._most = int(LARGER * _elements(args, kwargs))
        if self._kept:
            model.register_forward_pre_hook(_Hook(self._before_later), with_kwargs=True)

    def _before_later(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (engine := self._engine()) is None or engine.closed:
            return
        if (elements := _elements(args, kwargs)) > self._most:
            _LOG.info("a batch of %d elements, planned was for %d at most: its layers run again", elements, self._most)
        keep_last(engine, self._kept if elements <= self._most else 0)

    def _before_layer(self, *_: object) -> None:
        """Called where a layer trains though the model was not called: what wraps it may call its ``forward``."""
        if (engine := self._ready()) is not None and self._ends(engine):
            _LOG.info(_STAYS, engine.kind, engine.window.size, "a layer trains without a call of the model itself")

    def _ready(self) -> Engine | None:
        """Returns the engine, if there is an optimizer: before, somebody may look at a model's outputs."""
        engine = self._engine()
        if engine is None or engine.closed:
            return None
        return engine if engine.own_optimizer is not None or engine.held.other_optimizers else None

    def _ends(self, engine: Engine) -> bool:
        """Takes the hooks away; returns whether no other thread has."""
        for handle in self._handles:
            handle.remove()
        return _waiting.pop(engine, None) is not None

    def _plan(self, model: nn.Module, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FirstPlan:
        optimizer = engine.own_optimizer
        if type(optimizer) is not AdamW:
            raise _NotPlannedError("stronghold.AdamW does not train it")
        if (reason := refused_for(engine)) is not None:
            raise _NotPlannedError(reason)
        # Here, since what it imports takes a second that training does without.
        from stronghold.engine.planning.first_inputs import plan_first_pass

        kind = engine.device.torch_device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        with _apart(engine.device.torch_device):
            return plan_first_pass(
                model,
                _inputs(model, args, kwargs),
                engine.device,
                layers=self._layers,
                autocast=autocast,
                update="in_backward" if optimizer.in_backward else "deferred",
                states=optimizer.states,
                root=[unit.name for unit in engine.units if unit.is_root and unit.resident],
                held_bytes=engine.held.allocated_bytes(),
                process_bytes=engine.held.process_bytes,
                accumulate=self._accumulate,
            )


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Keeps what a plan computes from the pass that it comes before.

    That is from its random numbers, which a model may seed; from its autocast; and from hooks of the user's on saved
    tensors, such as those of a checkpoint around the model.
    """
    unsaved = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    enabled = torch.is_autocast_enabled(device.type)
    with drawn_apart(device), unsaved, torch.autocast(device.type, enabled=False) if enabled else nullcontext():
        yield


class _Hook:
    """Calls before a training pass; the hook of a copy, in memory or in a file, does nothing."""

    def __init__(self, call: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None] | None = None) -> None:
        self._call = call

    def __deepcopy__(self, memo: dict) -> _Hook:
        return _Hook()

    def __reduce__(self) -> tuple[Callable, tuple]:
        return getattr, (nullcontext(), "__exit__")  # takes anything, does nothing, and is there without stronghold

    @opaque
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._call is not None and module.training and torch.is_grad_enabled():
            self._call(module, args, kwargs)


def await_inputs(model: nn.Module, engine: Engine, layers: str | Sequence[str] | None, accumulate: int | None) -> None:
    """Has a model planned at its first training pass, where the device has memory of its own."""
    if not engine.device.is_host:
        _waiting[engine] = FirstPass(model, engine, layers, accumulate)


def awaits_inputs(engine: Engine) -> bool:
    """Whether a model is to be planned at its first training pass."""
    return engine in _waiting


def _elements(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return sum(leaf.numel() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))


def _inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any] | Mapping[str, Any]:
    """Returns the arguments of a call, in order or by name."""
    if not kwargs:
        return list(args)
    signature = inspect.signature(model.forward)
    named = signature.bind_partial(*args).arguments
    kinds = {signature.parameters[name].kind for name in named}
    if not kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}:
        raise _NotPlannedError("some of its inputs have no name")
    return {**named, **kwargs}
