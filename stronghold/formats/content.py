"""What a manifest may say: all of it is checked before anything of it is used.

Its checksum tells damage, not forgery: who alters it can renew that. So no name in it leads out of the directory,
no tensor out of its file, and nothing is of another type than what is done with it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stronghold.errors import CheckpointError
from stronghold.formats.moments import ADAMW, MUON, NAMES
from stronghold.formats.tensor_files import DTYPES
from stronghold.layout import BLOCK, PAGE_BYTES

BUFFERS = "buffers.safetensors"
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,250}")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}
_TRAINED = ("float32", "bfloat16")
_FROZEN = tuple(str(dtype).removeprefix("torch.") for dtype in DTYPES)
"""What a quantised weight consists of may be of any dtype."""
_NUMBERS = 2**63
"""What the system's and torch's own whole numbers are below."""

_KINDS = ("", "/remainder", *(f"/{m}{e}" for m in NAMES for e in ("", "/exponents")))
"""What follows a parameter's name in the names of its tensors."""

Check = Callable[[Any, str], None]


class _Wrong(Exception):
    """A rule that is broken, where, and by what."""


def parsed(data: str | bytes) -> Any:
    """Returns what JSON says; each key once, and no number that is none. Raises ValueError."""
    try:
        return json.loads(data, object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def check_content(content: Any, path: Path, *, files: bool) -> None:
    """Raises CheckpointError, naming the entry, where ``content`` is not what a manifest at ``path`` can say.

    Without ``files`` it is one of a checkpoint whose tensors are not in files of ours.
    """
    try:
        _check(content, files=files)
    except _Wrong as error:
        raise CheckpointError(
            f"{path} has been altered: {error}; nothing was loaded, pass another checkpoint"
        ) from None


def _check(content: Any, *, files: bool) -> None:
    _record(
        content,
        "the manifest",
        model=_text,
        step=_number,
        states=_one_of("fp32", "8bit"),
        files=_each(_plain_or_path, _file),
        parameters=_each(_text, _parameter),
        buffers=_each(_text, _buffer),
        optimizer=_each(_text, _anything),
        scheduler=_anything,
        random=_each(_text, _anything),
        extra=_anything,
    )
    _check_optimizer(content["optimizer"], content["parameters"])
    processes = content["random"].get("processes", [])
    _need(isinstance(processes, list), "random.processes", "a list", processes)
    for number, process in enumerate(processes):
        _each(_text, _anything)(process, f"random.processes[{number}]")
    if files:
        groups = zip(content["optimizer"]["groups"], content["optimizer"]["group_names"], strict=True)
        by_muon = {name for group, names in groups if group.get("use_muon") is True for name in names}
        for name, parameter in content["parameters"].items():
            _check_parameter(name, parameter, content, (MUON,) if name in by_muon else ADAMW)
        for name, buffer in content["buffers"].items():
            _check_buffer(name, buffer, content["files"])
    else:
        _need(not content["files"], "files", "empty", list(content["files"]))


# What an entry is by itself.


def _file(entry: Any, where: str) -> None:
    common: dict[str, Check] = {"unit": _text, "length_bytes": _whole}
    if isinstance(entry, dict) and "pages_crc32c" in entry:
        tensors = _each(_text, _tensor(placed=True))
        own: dict[str, Check] = {"parts": _parts, "stripe_bytes": _whole, "taken_bytes": _whole, "pages_crc32c": _crc}
        _record(entry, where, **common, **own, tensors=tensors)
        _check_unit_file(entry, where)
        return
    own = {"header_bytes": _whole, "header_crc32c": _crc, "tensors": _each(_text, _tensor(placed=False))}
    _record(entry, where, **common, **own)
    _need(_PLAIN.fullmatch(where.removeprefix("files.")), where, "a file's plain name in the directory", where[6:])
    taken = entry["header_bytes"] + sum(_length(tensor) for tensor in entry["tensors"].values())
    fits = entry["header_bytes"] >= 8 and taken == entry["length_bytes"]
    _need(fits, f"{where}.length_bytes", f"{taken}, the header's and the tensors' bytes", entry["length_bytes"])


def _check_unit_file(entry: dict[str, Any], where: str) -> None:
    parts, length, stripe = entry["parts"], entry["length_bytes"], entry["stripe_bytes"]
    _need(parts[0] == where.removeprefix("files."), f"{where}.parts", "files with the entry's own name first", parts)
    for name, value in (("stripe_bytes", stripe), ("length_bytes", length), ("taken_bytes", entry["taken_bytes"])):
        _need(value % PAGE_BYTES == 0, f"{where}.{name}", f"a multiple of {PAGE_BYTES}", value)
    _need(stripe > 0, f"{where}.stripe_bytes", "more than zero", stripe)
    _need(entry["taken_bytes"] <= length, f"{where}.taken_bytes", f"at most {length}", entry["taken_bytes"])
    end = 0
    for name, tensor in sorted(entry["tensors"].items(), key=lambda item: item[1]["offset"]):
        at, offset = f"{where}.tensors.{name}.offset", tensor["offset"]
        _need(offset % _DTYPES[tensor["dtype"]].itemsize == 0, at, "a multiple of its elements' size", offset)
        if _length(tensor):
            _need(offset >= end, at, f"{end} or more, where the tensor before it ends", offset)
            end = offset + _length(tensor)
            _need(end <= entry["taken_bytes"], at, f"within the {entry['taken_bytes']} bytes in use", offset)


def _tensor(*, placed: bool) -> Check:
    fields: dict[str, Check] = {"dtype": _one_of(*_DTYPES), "shape": _shape, "crc32c": _crc}
    return lambda entry, where: _record(entry, where, **fields, **({"offset": _whole} if placed else {}))


def _parameter(entry: Any, where: str) -> None:
    if isinstance(entry, dict):
        entry = {"beside": None, **entry}  # which the first format did not have
    _record(entry, where, shape=_shape, file=_text, step=_or_none(_number), beside=_or_none(_text))


def _buffer(entry: Any, where: str) -> None:
    if isinstance(entry, dict):
        entry = {"built": None, **entry}  # which the second format did not have
    _record(entry, where, dtype=_one_of(*_DTYPES), shape=_shape, persistent=_truth, built=_or_none(_crc))


# What entries are for one another.


def _check_optimizer(optimizer: dict[str, Any], parameters: Collection[str]) -> None:
    for name in ("groups", "group_names"):
        _need(isinstance(optimizer.get(name), list), f"optimizer.{name}", "a list", optimizer.get(name))
    _whole(optimizer.get("skipped_steps"), "optimizer.skipped_steps")
    groups, named = optimizer["groups"], optimizer["group_names"]
    _need(len(groups) == len(named), "optimizer.groups", f"{len(named)} groups, as many as have names", len(groups))
    seen: set[str] = set()
    for number, (group, names) in enumerate(zip(groups, named, strict=True)):
        _each(_text, _anything)(group, f"optimizer.groups[{number}]")
        _need("params" not in group, f"optimizer.groups[{number}]", "settings alone", sorted(group))
        where = f"optimizer.group_names[{number}]"
        known = isinstance(names, list) and all(isinstance(name, str) and name in parameters for name in names)
        _need(known, where, "a list of the parameters' names", names)
        _need(len({*names} | seen) == len(names) + len(seen), where, "names that are in no other place", names)
        seen.update(names)


def _check_parameter(name: str, parameter: dict[str, Any], content: dict[str, Any], moments: Sequence[str]) -> None:
    where, files, count = f"parameters.{name}", content["files"], math.prod(parameter["shape"])
    found: dict[str, Any] = {}
    for key in ("file", "beside"):
        file = parameter.get(key)
        if file is None:
            continue
        _need(file in files, f"{where}.{key}", "one of the files", file)
        tensors = {name + kind: t for kind in _KINDS if (t := files[file]["tensors"].get(name + kind)) is not None}
        _need(found.keys().isdisjoint(tensors), f"{where}.{key}", "a file that holds what the other does not", file)
        found |= tensors
    own = _TRAINED if parameter["step"] is not None else _FROZEN
    of: dict[str, tuple[Sequence[str], list[int]]] = {name: (own, parameter["shape"])}
    if f"{name}/remainder" in found:
        of[name] = (("bfloat16",), parameter["shape"])
        of[f"{name}/remainder"] = (("int16",), parameter["shape"])
    for moment in moments if parameter["step"] is not None else ():
        key = f"{name}/{moment}"
        if content["states"] == "fp32":
            of[key] = (("float32",), parameter["shape"])
        else:
            of[key] = (("uint8",), [count])
            of[f"{key}/exponents"] = (("uint8",), [-(-count // BLOCK)])
    for key, (dtypes, shape) in of.items():
        _need(key in found, where, f"a parameter with {key} in its files", sorted(found))
        tensor = found[key]
        fits = tensor["dtype"] in dtypes and tensor["shape"] == shape
        got = f"{tensor['dtype']} {tensor['shape']}"
        _need(fits, f"{where}, {key}", f"{' or '.join(dtypes)} {shape}", got)


def _check_buffer(name: str, buffer: dict[str, Any], files: Mapping[str, Any]) -> None:
    tensor = files.get(BUFFERS, {}).get("tensors", {}).get(name)
    _need(tensor is not None, f"buffers.{name}", f"in {BUFFERS}", "none")
    same = (tensor["dtype"], tensor["shape"]) == (buffer["dtype"], buffer["shape"])
    octets = tensor["dtype"] == "uint8" and tensor["shape"] == [_length(buffer)]
    got = f"{tensor['dtype']} {tensor['shape']}"
    _need(same or octets, f"buffers.{name}", f"{buffer['dtype']} {buffer['shape']} in {BUFFERS}", got)


def _length(tensor: Mapping[str, Any]) -> int:
    return _DTYPES[tensor["dtype"]].itemsize * math.prod(tensor["shape"])


# The rules for values.


def _need(fits: Any, where: str, rule: str, got: Any) -> None:
    if not fits:
        raise _Wrong(f"{where[:200]} must be {rule} (got {got!r:.200})")


def _record(value: Any, where: str, **fields: Check) -> None:
    _need(isinstance(value, dict), where, "a dictionary", value)
    known = value.keys() == fields.keys()
    _need(known, where, f"a dictionary of {', '.join(fields)}", ", ".join(map(str, value)))
    for name, check in fields.items():
        check(value[name], name if where == "the manifest" else f"{where}.{name}")


def _each(of_key: Check, of_value: Check) -> Check:
    def check(value: Any, where: str) -> None:
        _need(isinstance(value, dict), where, "a dictionary", value)
        for key, item in value.items():
            of_key(key, f"a name in {where}")
            of_value(item, f"{where}.{key}")

    return check


def _one_of(*known: str) -> Check:
    return lambda value, where: _need(isinstance(value, str) and value in known, where, f"one of {known}", value)


def _or_none(check: Check) -> Check:
    return lambda value, where: None if value is None else check(value, where)


def _anything(value: Any, where: str) -> None:
    del value, where


def _text(value: Any, where: str) -> None:
    _need(isinstance(value, str), where, "a text", value)


def _truth(value: Any, where: str) -> None:
    _need(isinstance(value, bool), where, "true or false", value)


def _whole(value: Any, where: str, below: int = _NUMBERS) -> None:
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < below
    _need(fits, where, f"a whole number from 0 to below {below}", value)


def _crc(value: Any, where: str) -> None:
    _whole(value, where, 2**32)


def _number(value: Any, where: str) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    _need(number and -_NUMBERS < value < _NUMBERS, where, "a number", value)


def _shape(value: Any, where: str) -> None:
    _need(isinstance(value, list) and len(value) <= 64, where, "a list of sizes", value)
    for size in value:
        _whole(size, where)
    _need(
        math.prod(size for size in value if size) < _NUMBERS // 16, where, "of so many elements as there can be", value
    )


def _plain_or_path(value: Any, where: str) -> None:
    """A plain name, or the path of a unit's file in another one of a store's directories."""
    _need(isinstance(value, str), where, "a text", value)
    folder, _, name = value.rpartition("/")
    _need(_PLAIN.fullmatch(name), where, "a file's plain name", value)
    if folder or value != name:
        whole = os.path.isabs(value) and os.path.normpath(value) == value and value.isprintable()
        _need(
            whole and re.fullmatch(r"(layer|root|edge)-\d{5,}\.bin", name),
            where,
            "a plain name, or a unit's file",
            value,
        )


def _parts(value: Any, where: str) -> None:
    _need(isinstance(value, list) and value, where, "a list of files", value)
    for part in value:
        _plain_or_path(part, where)
    names = {part.rpartition("/")[2] for part in value}
    _need(len(set(value)) == len(value) and len(names) == 1, where, "files of one name, each once", value)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"it has {twice[:100]!r} twice")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")
