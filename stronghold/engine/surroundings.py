"""What a function finds beside its arguments, which its second run is to find again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from stronghold.engine.process_generators import ProcessStates, drawing_from, process_marks, process_states


class Surroundings:
    """What a run finds beside its arguments: autocast, the default device, the states of generators.

    Of Python's and NumPy's generators that is where somebody has drawn from them meanwhile: the run, or another thread.
    """

    def __init__(self, device: torch.device, *, random: bool) -> None:
        self._device = device
        self._autocast = _autocast(device.type)
        self._default = torch.get_default_device()
        self._random = _random_states(device) if random else None
        self._process: ProcessStates | None = process_states() if random else None

    def ran(self) -> None:
        """Called when the run has ended."""
        if self._process is not None and self._process.marks == process_marks():
            self._process = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Runs the block with all of it as it was, and the generators afterwards as they are now."""
        now = None if self._random is None else _random_states(self._device)
        with ExitStack() as stack:
            if self._process is not None:
                stack.enter_context(drawing_from(self._process))
            if (autocast := self._autocast) != _autocast(self._device.type):
                cached = autocast[-1]
                for kind, enabled, dtype in autocast[0]:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
            if self._default != torch.get_default_device():
                stack.enter_context(self._default)
            if now is None:
                yield
                return
            assert self._random is not None
            _set_random_states(self._device, self._random)
            try:
                yield
            finally:
                _set_random_states(self._device, now)


def _autocast(device_type: str) -> tuple[list[tuple[str, bool, torch.dtype]], bool]:
    """Returns whether autocast is on, and to what, by kind of device; and whether it keeps its casts of weights."""
    kinds = ["cpu"] if device_type == "cpu" else ["cpu", device_type]
    found = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in kinds
        if torch.amp.is_autocast_available(kind)
    ]
    return found, torch.is_autocast_cache_enabled()


def _random_states(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Returns the states of the CPU's generator and of the device's."""
    own = _generators_of(device)
    return torch.get_rng_state(), None if own is None else own.get_rng_state(device)


def _set_random_states(device: torch.device, states: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        _generators_of(device).set_rng_state(states[1], device)


def _generators_of(device: torch.device) -> Any:
    """Returns PyTorch's module for a device with a generator of its own, or None."""
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    return module if hasattr(module, "get_rng_state") else None
