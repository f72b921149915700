"""Manifests that somebody has altered, checksum and all. Holds no tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stronghold.formats.manifest import NAME
from stronghold.native import crc32c

Change = Callable[[Any], Any]


def content(directory: Path) -> dict[str, Any]:
    found = json.loads((directory / NAME).read_bytes())
    del found["crc32c"]
    return found


def write(directory: Path, text: str) -> None:
    """Writes a manifest whose text is ``text``, the closing bracket left to the checksum."""
    data = text.encode("utf-8", "surrogatepass")
    crc = crc32c(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    (directory / NAME).write_bytes(data + f',\n "crc32c": "{crc:08x}"\n}}\n'.encode("ascii"))


def forge(directory: Path, change: Change) -> None:
    """Writes the manifest as ``change`` leaves or returns its content."""
    found = content(directory)
    changed = change(found)
    write(directory, json.dumps(found if changed is None else changed, indent=1).removesuffix("\n}"))
