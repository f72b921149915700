"""The moments of AdamW, and Muon's momentum: one buffer a unit, one view a parameter, where the unit lives."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, MutableMapping, ValuesView
from typing import Any

import torch
from torch import Tensor

from stronghold.device import Buffer
from stronghold.layout import BLOCK, Layout, lay_out
from stronghold.native import Blocks
from stronghold.optim.blocks import exponents_of
from stronghold.unit import Unit

Moment = Tensor | Blocks
ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")
MUON_MOMENTS = ("momentum_buffer",)


class ParameterState:
    """A parameter's entry in ``optimizer.state``, read and written as a dictionary is: its step and its moments.

    It is no ``collections.abc.Mapping``. Lightning's Trainer walks through those at the beginning of a fit and at its
    end, and puts copies on its device in the place of moments, which are updated where their unit lives.
    """

    __slots__ = ("_entries",)

    def __init__(self, **entries: Any) -> None:
        self._entries = entries

    def __getitem__(self, name: str) -> Any:
        return self._entries[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._entries[name] = value

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return repr(self._entries)

    def get(self, name: str, default: Any = None) -> Any:
        return self._entries.get(name, default)

    def keys(self) -> KeysView[str]:
        return self._entries.keys()

    def values(self) -> ValuesView[Any]:
        return self._entries.values()

    def items(self) -> ItemsView[str, Any]:
        return self._entries.items()

    def copy(self) -> dict[str, Any]:
        """Returns a dictionary of the same tensors."""
        return self._entries.copy()

    def update(self, *others: Any, **entries: Any) -> None:
        self._entries.update(*others, **entries)

    def setdefault(self, name: str, default: Any = None) -> Any:
        return self._entries.setdefault(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        return self._entries.pop(name, *default)

    def clear(self) -> None:
        self._entries.clear()


def moments_of(state: ParameterState | dict[str, Any] | None) -> tuple[str, ...]:
    """Returns the names of the moments in a parameter's state, which is None or empty where there is none."""
    if not state:
        return ()
    return MUON_MOMENTS if MUON_MOMENTS[0] in state else ADAMW_MOMENTS


def as_state(step: Tensor | float, moments: tuple[Moment, ...]) -> ParameterState:
    """Returns a parameter's state, of AdamW with two moments, of Muon with one; ``step`` is on the host."""
    if not isinstance(step, Tensor):
        step = torch.tensor(step, dtype=torch.float32, device="cpu")
    names = MUON_MOMENTS if len(moments) == 1 else ADAMW_MOMENTS
    return ParameterState(step=step, **dict(zip(names, moments, strict=True)))


def _moved(state: ParameterState, moments: tuple[Moment, ...]) -> ParameterState:
    """Returns a state as it is in the memory of ``moments``, which is written."""
    there = as_state(state["step"], moments)
    for name in there.keys() - {"step"}:
        _copy(there[name], state[name])
    return there


def _copy(target: Moment, source: Moment) -> None:
    if isinstance(target, Tensor):
        assert isinstance(source, Tensor)
        target.copy_(source)
        return
    assert not isinstance(source, Tensor)
    target.codes.copy_(source.codes)
    target.exponents.copy_(source.exponents)


def lay_out_moments(unit: Unit, indices: Iterable[int], states: str) -> Layout:
    """Returns how the moments of the parameters at ``indices`` lie in one buffer.

    First all first moments, then all second ones; then, as ``states`` is ``"fp32"``, 8 bytes per parameter, or
    ``"8bit"``, 2 bytes, the exponents of both likewise.
    """
    counts = [unit.parameters[index].numel() for index in indices]
    if states == "fp32":
        arrays = [[4 * count for count in counts]] * 2
    else:
        arrays = [counts, counts, *[[exponents_of(count) for count in counts]] * 2]
    return lay_out([size for array in arrays for size in array], unit.alignment)


def lay_out_momentum(unit: Unit, indices: Iterable[int]) -> Layout:
    """Returns how Muon's momentum of the parameters at ``indices`` lies in one buffer: 4 bytes per parameter."""
    return lay_out([4 * unit.parameters[index].numel() for index in indices], unit.alignment)


def _nowhere(unit: Unit, index: int) -> bool:
    return False


class Moments:
    """``exp_avg`` and ``exp_avg_sq`` of the parameters that are trained, or the one ``momentum_buffer``.

    The latter is of those that ``by_muon`` names. Memory that a unit's frozen parameters would need is not taken; a
    parameter that is unfrozen later gets its own.
    """

    def __init__(self, states: str, by_muon: Callable[[Unit, int], bool] = _nowhere) -> None:
        self.states = states
        self._by_muon = by_muon
        self._buffers: dict[int, list[Buffer]] = {}
        """By the unit's id."""
        self._moments: dict[tuple[int, int], tuple[Moment, ...]] = {}
        self._used: set[tuple[int, int]] = set()

    def missing_bytes(self, unit: Unit, indices: Iterable[int]) -> int:
        """Returns what :meth:`allocate` would take."""
        by_adamw, by_muon = self._missing(unit, indices)
        return lay_out_moments(unit, by_adamw, self.states).total_bytes + lay_out_momentum(unit, by_muon).total_bytes

    def _missing(self, unit: Unit, indices: Iterable[int]) -> tuple[list[int], list[int]]:
        """Returns those of ``indices`` that have no moments yet: AdamW's, and Muon's."""
        missing = [index for index in indices if (id(unit), index) not in self._moments]
        by_muon = [index for index in missing if self._by_muon(unit, index)]
        return [index for index in missing if index not in by_muon], by_muon

    def allocate(self, unit: Unit, indices: Iterable[int]) -> None:
        """Allocates moments, all zero, for the parameters at ``indices`` of ``unit`` that have none yet."""
        by_adamw, by_muon = self._missing(unit, indices)
        if by_muon:
            layout = lay_out_momentum(unit, by_muon)
            buffer = unit.allocate(layout.total_bytes, "moments")
            self._buffers.setdefault(id(unit), []).append(buffer)
            for index, offset in zip(by_muon, layout.offsets, strict=True):
                self._moments[id(unit), index] = (buffer.view(offset, unit.shapes[index], torch.float32),)
        if by_adamw:
            self._allocate_pairs(unit, by_adamw)

    def _allocate_pairs(self, unit: Unit, indices: list[int]) -> None:
        layout = lay_out_moments(unit, indices, self.states)
        buffer = unit.allocate(layout.total_bytes, "moments")
        self._buffers.setdefault(id(unit), []).append(buffer)
        count = len(indices)
        for number, index in enumerate(indices):
            shape, elements = unit.shapes[index], unit.parameters[index].numel()
            first, second, *exponents = layout.offsets[number::count]
            if self.states == "fp32":
                one, other = (buffer.view(offset, shape, torch.float32) for offset in (first, second))
                self._moments[id(unit), index] = (one, other)
                continue
            codes = [buffer.view(offset, (elements,), torch.uint8) for offset in (first, second)]
            scales = [buffer.view(offset, (exponents_of(elements),), torch.uint8) for offset in exponents]
            blocks = [Blocks(codes=c, exponents=e) for c, e in zip(codes, scales, strict=True)]
            self._moments[id(unit), index] = (blocks[0], blocks[1])

    def move_with(self, unit: Unit, move: Callable[[], None], states: MutableMapping[Tensor, ParameterState]) -> None:
        """Has ``move`` take a unit to the device, and its moments behind it, with their values in ``states``.

        Where one of them has no room there, it raises what says so, and both are where they were.
        """
        size = sum(buffer.length_bytes for buffer in self._buffers.get(id(unit), []))
        room = unit.memory.device.device_buffer(size)  # before anything has moved
        move()
        del room
        indices = list(self.held(unit))
        for index in indices:
            del self._moments[id(unit), index]
            self._used.discard((id(unit), index))
        self._buffers.pop(id(unit), None)  # their memory goes with the last state that is in it
        self.allocate(unit, indices)
        for parameter, index in ((unit.parameters[index], index) for index in indices):
            if state := states.get(parameter):
                states[parameter] = _moved(state, self.of(unit, index))

    def begin(self, unit: Unit, index: int) -> tuple[Moment, ...]:
        """Returns the moments of a parameter without state: all zero, though it had one that was since dropped."""
        used = (id(unit), index) in self._used
        moments = self.of(unit, index)
        if used:
            unit.mark_dirty()
            begin, end = unit.share(index)
            for moment in moments:
                if isinstance(moment, Tensor):
                    moment.view(-1)[begin:end].zero_()
                    continue
                moment.codes[begin:end].zero_()
                moment.exponents[begin // BLOCK : exponents_of(end)].zero_()
        return moments

    def distrust(self) -> None:
        """Called when moments without a state have been written: their memory need not be zero."""
        self._used.update(self._moments)

    def held(self, unit: Unit) -> dict[int, tuple[Moment, ...]]:
        """Returns what is allocated of one unit, by the parameter's number, to be looked at alone."""
        return {index: moments for (of, index), moments in self._moments.items() if of == id(unit)}

    def of(self, unit: Unit, index: int) -> tuple[Moment, ...]:
        """Returns (exp_avg, exp_avg_sq) of one parameter, in its shape or as blocks, or (momentum_buffer,)."""
        self.allocate(unit, [index])
        self._used.add((id(unit), index))
        return self._moments[id(unit), index]
