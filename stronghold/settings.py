"""The settings of ``offload`` and ``AdamW``, validated once where they enter."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NoReturn

from stronghold.units import parse_bytes

STATES = ("fp32", "8bit")
"""The formats of AdamW's moments."""
UPDATES = ("deferred", "in_backward")
"""When layers are updated."""


ACTIVATIONS = ("recompute", "keep", "host", "disk")
"""What the backward pass finds of a layer."""


@dataclass(frozen=True, kw_only=True)
class OffloadSettings:
    """How a model is offloaded; the meaning of each is in ``stronghold.offload``.

    ``store`` is kept as ``"ram"``, one text, or a tuple of several, whatever it was given as.

    Raises ValueError for a value out of range. What depends on the model (a window longer than its row of layers, a
    budget) is checked where the model is known.
    """

    window: int | str = "auto"
    store: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = "ram"
    micro_batch: int | str | None = None
    activations: int | str = "recompute"
    resident: int | str = 0
    device_memory: int | str | None = None
    host_memory: int | str | None = None
    accumulate: int | None = None
    update: str | None = None
    states: str | None = None
    compile: bool | str | Mapping[str, Any] = False

    def __post_init__(self) -> None:
        if self.window != "auto" and (not isinstance(self.window, int) or isinstance(self.window, bool)):
            raise ValueError(f"window must be a number of layers or 'auto' (got {self.window!r})")
        paths = [self.store] if isinstance(self.store, (str, os.PathLike)) else self.store
        if not (isinstance(paths, (list, tuple)) and paths and all(isinstance(p, (str, os.PathLike)) for p in paths)):
            raise ValueError(
                f"store must be 'ram', the path of a directory, or a list of such paths (got {self.store!r})"
            )
        for path in paths:
            if path == "disk" or (path == "ram" and not isinstance(self.store, str)):
                raise ValueError(
                    f"store must be 'ram' alone, or directories on the disks to use (got {path!r} in "
                    f"store={self.store!r}); pass one such as '/mnt/nvme/run1', or './{path}' for one of that name"
                )
        named = [os.fspath(path) for path in paths]
        if not isinstance(self.store, str):  # a directory, where the text would be the word
            named = [os.path.join(os.curdir, name) if name in ("ram", "disk") else name for name in named]
        if not all(named) or len(set(map(os.path.realpath, named))) < len(named):
            raise ValueError(f"store must name each directory once (got {self.store!r})")
        object.__setattr__(self, "store", named[0] if len(named) == 1 else tuple(named))
        if self.micro_batch not in (None, "auto") and (
            not isinstance(self.micro_batch, int) or isinstance(self.micro_batch, bool) or self.micro_batch < 1
        ):
            raise ValueError(
                f"micro_batch must be a number of samples, 1 or more (got {self.micro_batch!r}); pass None to run each "
                "layer over the whole batch, or 'auto'"
            )
        if self.activations != "auto":
            check_activations(self.activations)
        if self.activations == "disk" and not self.directories:
            raise ValueError(
                "activations='disk' keeps the layers' inputs in the store's directory (got store='ram'); pass store=, "
                "a directory on a disk, or activations='host'"
            )
        if self.resident != "auto" and (
            not isinstance(self.resident, int) or isinstance(self.resident, bool) or self.resident < 0
        ):
            raise ValueError(f"resident must be a number of layers, 0 or more, or 'auto' (got {self.resident!r})")
        for name in ("device_memory", "host_memory"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, parse_bytes(value))
        check_accumulate(self.accumulate)
        for name, known in (("update", UPDATES), ("states", STATES)):
            if (value := getattr(self, name)) is not None:
                check_one_of(name, value, known)
        check_together(self.update, self.accumulate)
        compile_arguments(self.compile)

    def check_known(self) -> None:
        """Raises ValueError where the inputs of a step would have to be known."""
        for name in ("micro_batch", "activations"):
            if getattr(self, name) == "auto":
                raise ValueError(
                    f"{name}='auto' is chosen for the inputs of a step (got none); pass a batch such as the model will "
                    "be trained with as inputs=, or a value"
                )

    @property
    def accumulates(self) -> bool:
        """Whether it is known that a step adds up the gradients of several batches."""
        return self.accumulate not in (None, 1)

    @property
    def micro_batch_samples(self) -> int | None:
        """``micro_batch`` once it is no ``"auto"`` any more."""
        assert not isinstance(self.micro_batch, str)
        return self.micro_batch

    @property
    def inputs_host_bytes(self) -> int:
        """What of ``host_memory`` is left to the layers' inputs: none where nobody knows what these will take."""
        return 0

    @property
    def directories(self) -> list[str]:
        """The directories of a store on disk; none for one in host memory."""
        if isinstance(self.store, (str, os.PathLike)):
            return [] if self.store == "ram" else [os.fspath(self.store)]
        return [os.fspath(path) for path in self.store]


@dataclass(frozen=True, kw_only=True)
class PlannedSettings(OffloadSettings):
    """Those that were planned for inputs, with the bytes of the host's memory that layers' inputs will take."""

    kept_inputs_bytes: int = 0

    @property
    def inputs_host_bytes(self) -> int:
        return self.kept_inputs_bytes


def compile_arguments(asked: bool | str | Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the arguments of torch.compile that ``offload(compile=asked)`` means; None for False.

    Raises ValueError for what is no such thing, and for CUDA graphs.
    """
    if isinstance(asked, bool):
        return {} if asked else None
    if asked in _OF_CUDA_GRAPHS:
        refuse_cuda_graphs(f"compile={asked!r}")
    if asked in _MODES:
        raise ValueError(
            f"a text names a backend of torch.compile (got compile={asked!r}, one of its modes); pass "
            f"compile={{'mode': {asked!r}}}"
        )
    arguments = {"backend": asked} if isinstance(asked, str) else asked
    if not isinstance(arguments, Mapping) or not arguments.keys() <= _COMPILE:
        raise ValueError(
            f"compile must be True, a backend's name, or a dictionary of torch.compile's {', '.join(sorted(_COMPILE))} "
            f"(got {asked!r}); pass compile=True"
        )
    if (mode := arguments.get("mode")) in _OF_CUDA_GRAPHS:
        refuse_cuda_graphs(f"mode={mode!r}")
    return {name: value for name, value in arguments.items() if value is not None}


_COMPILE = frozenset({"backend", "mode", "options", "dynamic", "fullgraph"})
_OF_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
_MODES = ("default", "lite", "max-autotune-no-cudagraphs")
"""Those of torch.compile without them."""


def refuse_cuda_graphs(got: str) -> NoReturn:
    """Raises ValueError."""
    raise ValueError(
        "a CUDA graph reads weights where they were when it was recorded, and a layer comes into another slot in each "
        f"pass (got {got}); compile without CUDA graphs: mode='default', or 'max-autotune-no-cudagraphs'"
    )


def check_optimizer(states: str, update: str, nonfinite: str, max_grad_norm: float | None) -> None:
    """Raises ValueError for what ``stronghold.AdamW`` does not know."""
    check_one_of("states", states, STATES)
    check_one_of("update", update, UPDATES)
    check_one_of("nonfinite", nonfinite, ("raise", "skip"))
    if max_grad_norm is None:
        return
    number = isinstance(max_grad_norm, Real) and not isinstance(max_grad_norm, bool)
    if not (number and 0 < max_grad_norm < math.inf):
        raise ValueError(
            f"max_grad_norm must be a positive number, or None for no clipping (got {max_grad_norm!r}); pass one such "
            "as 1.0"
        )
    if update == "in_backward":
        raise ValueError(
            f"max_grad_norm needs all gradients before the first update (got max_grad_norm={max_grad_norm} with "
            "update='in_backward', which updates each layer during the backward pass); use update='deferred', or no "
            "clipping: max_grad_norm=None (--clip 0)"
        )


def check_accumulate(accumulate: int | None) -> None:
    """Raises ValueError for what is no number of batches whose gradients a step adds up, nor None."""
    if accumulate is not None and (not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1):
        raise ValueError(f"accumulate must be a number of batches, 1 or more (got {accumulate!r}); pass one, or None")


def check_together(update: str | None, accumulate: int | None) -> None:
    """Raises ValueError for updates that add up the gradients of one batch alone, where a step has several."""
    if update == "in_backward" and accumulate not in (None, 1):
        raise ValueError(
            f"update='in_backward' updates each layer in every backward pass (got accumulate={accumulate}); pass "
            "update='deferred', or a larger batch with micro_batch="
        )


def check_activations(activations: object) -> None:
    """Raises ValueError unless it is one of ``ACTIVATIONS`` or a number of layers."""
    number = isinstance(activations, int) and not isinstance(activations, bool) and activations >= 0
    if not number and activations not in ACTIVATIONS:
        raise ValueError(
            f"activations must be {', '.join(map(repr, ACTIVATIONS))}, a number of layers, the last ones, that keep "
            f"them, or with inputs= 'auto' (got {activations!r})"
        )


def kept_layers(activations: int | str, layers: int) -> int:
    """Returns how many of so many ``layers`` keep what autograd saves: the last ones; the others run again.

    Raises ValueError for more than there are.
    """
    if isinstance(activations, str):
        return layers if activations == "keep" else 0
    if activations > layers:
        raise ValueError(
            f"activations must be no more layers than there are, {layers}, where it is a number of those that keep "
            f"them (got {activations}); pass 'keep' for all"
        )
    return activations


def without_place(activations: int | str) -> int | str:
    """Returns ``activations`` but for where the inputs of layers that run again wait, which changes no number."""
    return "recompute" if activations in ("host", "disk") else activations


def check_one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises ValueError where ``value`` is not one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))} (got {value!r}); pass one of them")
