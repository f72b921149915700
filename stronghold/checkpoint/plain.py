"""Python values as JSON and back, to the bit: what safetensors does not hold of a checkpoint, without pickle.

Numbers, texts, lists and dictionaries with texts for keys are themselves; everything else is a dictionary of one key
that begins with ``$`` and names its kind. Python writes a float with as many digits as give it back exactly.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stronghold.errors import CheckpointError
from stronghold.formats.manifest import name_of


def to_plain(value: Any, where: str = "value") -> Any:
    """Returns ``value`` as what JSON knows. Raises ValueError, with its place, for what cannot be kept."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        number = float(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        dtype = name_of(value.dtype)
        return {"$tensor": {"dtype": dtype, "shape": list(value.shape), "data": _text(flat.numpy().tobytes())}}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"$array": {"dtype": value.dtype.str, "shape": list(value.shape), "data": _text(value.tobytes())}}
    if isinstance(value, (list, tuple)):
        items = [to_plain(item, f"{where}[{number}]") for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        plain = not isinstance(value, Counter)
        if plain and all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: to_plain(item, f"{where}.{key}") for key, item in value.items()}
        pairs = [[to_plain(key, where), to_plain(item, f"{where}.{key}")] for key, item in value.items()]
        return {"$dict" if plain else "$counter": pairs}
    raise ValueError(
        f"a checkpoint holds numbers, texts, tensors and lists, tuples and dictionaries of them (got a "
        f"{type(value).__name__} at {where}); leave it out, or turn it into such"
    )


def from_plain(value: Any) -> Any:
    """Returns what :func:`to_plain` was given. Raises CheckpointError for what that cannot have returned."""
    try:
        return _from_plain(value)
    except Exception as error:  # numpy, torch, base64 and Python refuse each in its own way
        raise CheckpointError(
            f"a checkpoint's values must be as they were written ({type(error).__name__}: {error}); it has been "
            "altered, pass another one"
        ) from error


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind: str = next(iter(value), "")
    held: Any = value.get(kind)
    if not kind.startswith("$"):
        return {key: _from_plain(item) for key, item in value.items()}
    if kind == "$float":
        return float(held)
    if kind == "$tuple":
        return tuple(_from_plain(item) for item in held)
    if kind in ("$dict", "$counter"):
        pairs = {_from_plain(key): _from_plain(item) for key, item in held}
        return pairs if kind == "$dict" else Counter(pairs)
    data = bytearray(base64.b64decode(held["data"], validate=True))
    if kind == "$array":
        return np.frombuffer(data, dtype=np.dtype(held["dtype"])).reshape(held["shape"])
    dtype = getattr(torch, held["dtype"])
    if not data:
        return torch.empty(0, dtype=dtype, device="cpu").view(held["shape"])
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(held["shape"])


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
