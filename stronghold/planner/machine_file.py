"""What was measured of a machine, with its spread, and the JSON file that keeps it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from stronghold.formats.whole_file import write_whole
from stronghold.planner.machine_rows import machine_rows
from stronghold.tables import Shown

VERSION = 1
_LEAST, _LARGEST, _MOST = 1e-30, 1e30, 2**63 - 1
"""The least and the largest numbers of a file: whose products and quotients a float takes, and of counts 64 bits."""
REMEDY = "measure the machine again: stronghold probe -o machine.json"
LINK = ("h2d", "d2h", "h2d_beside_d2h", "d2h_beside_h2d", "h2d_pageable", "copy_s")
"""What is measured of the link: bytes per second, alone and beside the other way, and seconds of a copy of nothing."""
UPDATE = ("alone", "beside_compute")
DISK = ("read", "write", "read_beside_write", "write_beside_read")
PROCESSES = ("message_s", "bytes_per_s")
"""What is measured of messages between processes: the seconds of a small one, and what large ones sustain."""
SINCE = ("host_call_s", "threads")
"""What files of older probes lack."""
BESIDE_COMPUTE = ("slows_compute", "slowed_by_compute")
"""How many times as long computing takes beside a disk's transfers, and those beside it, where that was measured."""


class Spread(NamedTuple):
    """The lower quartile, the median and the upper quartile of what was measured several times."""

    low: float
    likely: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Returns those of ``values``, one or more."""
        ordered, last = sorted(values), len(values) - 1

        def at(share: float) -> float:
            below = math.floor(share * last)
            above = min(below + 1, last)
            return ordered[below] + (share * last - below) * (ordered[above] - ordered[below])

        return cls(at(0.25), at(0.5), at(0.75))


class Product(NamedTuple):
    """What products of m x k by k x n sustain, FLOP per second, ``sizes`` being (m, n, k)."""

    dtype: str
    sizes: tuple[int, ...]
    flop_per_s: Spread


class Attention(NamedTuple):
    """What scaled dot-product attention sustains; ``sizes`` are (batch, heads, queries, keys, head size).

    It is measured under a causal mask, and the operations are counted without one: 4 times the product of the sizes
    forward, 10 times backward.
    """

    dtype: str
    sizes: tuple[int, ...]
    forward_flop_per_s: Spread
    backward_flop_per_s: Spread


@dataclass(frozen=True, kw_only=True)
class MachineFile(Shown):
    """A machine as the planner sees it: what ``stronghold.probe`` measured; ``str()`` of it is a table to read.

    ``device`` is the torch device on which layers compute, ``is_host`` tells that its memory is the host's, and
    ``runs_behind`` that it computes on its own while the host issues more. Rates are per second: bytes that
    ``elementwise`` operators read and write, ``elementwise_cached`` ones over no more than ``cache_bytes``, and
    ``transcendental`` ones, each by dtype; some of the last are told apart ("float32 gelu backward"). ``op_s`` is the
    least that an operator takes of the device (of a host, what calling one takes) and ``launch_s`` what issuing one
    takes of the host, both in layers such as models have. ``host_call_s`` is what a small one takes that the host
    computes itself, which tells how fast Python is; None in files of older probes. ``host_update_ns`` is per element,
    by weights and moments ("bfloat16+8bit"), alone and beside computing, and ``compute_beside_update`` how many times
    as long computing takes beside updates. ``device_update_ns`` is the same of a resident layer.
    ``threads`` are those of PyTorch when it was measured, None in files of older probes, whose ``op_s`` of a host is
    that of a chain of equal operators, a quarter to a seventh of what one takes in a layer.
    ``disks`` are by directory. ``processes`` are two of this machine that send to one another, empty where that was not
    measured.
    """

    title = "machine"

    device: str
    device_name: str
    is_host: bool
    runs_behind: bool
    device_memory_bytes: int | None
    host_memory_bytes: int
    cores: int
    processor: str
    time: str
    versions: Mapping[str, str]
    link: Mapping[str, Spread]
    matmul: Sequence[Product]
    attention: Sequence[Attention]
    elementwise: Mapping[str, Spread]
    elementwise_cached: Mapping[str, Spread]
    transcendental: Mapping[str, Spread]
    cache_bytes: int
    op_s: Spread
    launch_s: Spread
    host_update_ns: Mapping[str, Mapping[str, Spread]]
    compute_beside_update: Spread
    device_update_ns: Mapping[str, Spread] = field(default_factory=dict)
    disks: Mapping[str, Mapping[str, Spread]] = field(default_factory=dict)
    processes: Mapping[str, Spread] = field(default_factory=dict)
    host_call_s: Spread | None = None
    threads: int | None = None
    version: int = VERSION

    @property
    def computing_threads(self) -> int:
        """Those that share an operator of PyTorch's on the host: of files of older probes all cores."""
        return self.cores if self.threads is None else self.threads

    def rows(self) -> list[tuple[str, str, str]]:
        """Returns the table's lines: (section, name, value)."""
        return machine_rows(self)

    def to_json(self) -> str:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        for name in ("matmul", "attention"):
            values[name] = [one._asdict() for one in values[name]]
        return json.dumps({"version": values.pop("version"), **values}, indent=1) + "\n"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, which is the old or the new one whole at any time. Raises OSError."""
        write_whole(path, self.to_json())

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> MachineFile:
        """Returns what :meth:`write` wrote. Raises ValueError for a file that is no machine's, OSError for none."""
        return cls.from_json(Path(path).read_text(encoding="utf-8", errors="replace"), str(path))

    @classmethod
    def from_json(cls, text: str, where: str = "the text") -> MachineFile:
        """Returns what :meth:`to_json` made; errors name ``where`` it was. Raises ValueError."""
        return _Reading(where).machine(text)


class _Reading:
    """Checks what a file holds, value by value."""

    def __init__(self, where: str) -> None:
        self._where = where

    def machine(self, text: str) -> MachineFile:
        try:
            found = json.loads(text)
        except ValueError as error:
            raise self._wrong("file", "JSON", str(error)) from None
        except RecursionError:
            raise self._wrong("file", "JSON", "what is nested too deeply") from None
        found = self._mapping("file", found)
        if found.get("version") != VERSION:
            raise self._wrong("version", f"{VERSION}", found.get("version"))
        names = {one.name for one in fields(MachineFile)}
        found = {**dict.fromkeys(SINCE), **found}
        if names != set(found):
            raise self._wrong("file", f"an object of {sorted(names)}", sorted(found))
        read: dict[str, Any] = dict(found)
        for name in ("device", "device_name", "processor", "time"):
            read[name] = self._is(name, found[name], str, "a text")
        for name in ("is_host", "runs_behind"):
            read[name] = self._is(name, found[name], bool, "true or false")
        for name, least in (("host_memory_bytes", 0), ("cores", 1), ("cache_bytes", 0)):
            read[name] = self._count(name, found[name], least=least)
        if found["device_memory_bytes"] is not None:
            read["device_memory_bytes"] = self._count("device_memory_bytes", found["device_memory_bytes"])
        for name in ("op_s", "launch_s", "compute_beside_update"):
            read[name] = self._measured(name, found[name], may_be_zero=name != "compute_beside_update")
        if found["threads"] is not None:
            read["threads"] = self._count("threads", found["threads"], least=1)
        if found["host_call_s"] is not None:
            read["host_call_s"] = self._measured("host_call_s", found["host_call_s"])
        for name in ("elementwise", "elementwise_cached", "transcendental", "device_update_ns"):
            read[name] = self._several(name, found[name])
        read["link"] = self._several("link", found["link"], LINK)
        read["processes"] = self._several("processes", found["processes"], PROCESSES if found["processes"] else ())
        for name, kinds in (("host_update_ns", UPDATE), ("disks", DISK)):
            entries = self._mapping(name, found[name])
            read[name] = {key: self._several(f"{name}[{key!r}]", entry, kinds) for key, entry in entries.items()}
        if not found["elementwise"] or not found["host_update_ns"]:
            empty = next(name for name in ("elementwise", "host_update_ns") if not found[name])
            raise self._wrong(empty, "measurements", "none")
        read["matmul"] = [self._entry("matmul", one, Product, 3) for one in self._list("matmul", found["matmul"])]
        attention = self._list("attention", found["attention"])
        read["attention"] = [self._entry("attention", one, Attention, 5) for one in attention]
        read["versions"] = {
            key: self._is("versions", value, str, "texts")
            for key, value in self._mapping("versions", found["versions"]).items()
        }
        return MachineFile(**read)

    def _wrong(self, name: str, rule: str, got: Any) -> ValueError:
        return ValueError(f"{name} of the machine file {self._where} must be {rule} (got {got!r}); {REMEDY}")

    def _is(self, name: str, value: Any, kind: type, rule: str) -> Any:
        if not isinstance(value, kind):
            raise self._wrong(name, rule, value)
        return value

    def _mapping(self, name: str, value: Any) -> dict[str, Any]:
        return self._is(name, value, dict, "an object")

    def _list(self, name: str, value: Any) -> list[Any]:
        return self._is(name, value, list, "a list")

    def _count(self, name: str, value: Any, *, least: int = 0) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
            raise self._wrong(name, f"a whole number of {least} or more, which 64 bits hold", value)
        return value

    def _measured(self, name: str, value: Any, *, may_be_zero: bool = False) -> Spread:
        def is_one(one: Any) -> bool:
            zero = may_be_zero and one == 0
            return type(one) in (int, float) and (zero or _LEAST <= one <= _LARGEST)

        if not (isinstance(value, list) and len(value) == 3 and all(map(is_one, value)) and value == sorted(value)):
            above = f"{'0, or ' if may_be_zero else ''}from {_LEAST:g} to {_LARGEST:g}"
            raise self._wrong(name, f"three numbers, {above}, none below the one before", value)
        return Spread(*value)

    def _several(self, name: str, value: Any, needed: Sequence[str] = ()) -> dict[str, Spread]:
        found = self._mapping(name, value)
        if missing := [one for one in needed if one not in found]:
            raise self._wrong(name, f"an object with {', '.join(needed)}", f"nothing of {', '.join(missing)}")
        zero = ("copy_s",)
        return {key: self._measured(f"{name}[{key!r}]", one, may_be_zero=key in zero) for key, one in found.items()}

    def _entry(self, name: str, value: Any, kind: type[Any], count: int) -> Any:
        found = self._mapping(name, value)
        if set(found) != set(kind._fields):
            raise self._wrong(name, f"a list of objects of {list(kind._fields)}", sorted(found))
        sizes = [self._count(f"{name}.sizes", size) for size in self._list(f"{name}.sizes", found["sizes"])]
        if len(sizes) != count or 0 in sizes:
            raise self._wrong(f"{name}.sizes", f"{count} numbers above 0", found["sizes"])
        rates = {key: self._measured(f"{name}.{key}", one) for key, one in found.items() if key.endswith("_per_s")}
        return kind(dtype=self._is(f"{name}.dtype", found["dtype"], str, "a text"), sizes=tuple(sizes), **rates)
