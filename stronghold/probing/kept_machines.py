"""Where the probe keeps what it measured, and whose it is.

The files lie in ``~/.cache/stronghold/machines``, one for each device of each machine: homes may be shared. A file is
used where its processor, cores, memory, device, PyTorch and the precision of its products in fp32 are those at hand.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from stronghold.errors import StrongholdError
from stronghold.planner.machine_file import MachineFile, Spread
from stronghold.probing.this_machine import FP32_PRODUCTS, Facts, facts_of

EXACT = "highest"
"""The precision of a file that does not tell it, and what PyTorch begins with."""
SAME_MEMORY = 0.02
"""What a machine's memory may seem to change by, as kernels take more or less of it."""


def folder() -> Path:
    return Path(os.path.expanduser("~")) / ".cache" / "stronghold" / "machines"


def path_of(facts: Facts) -> Path:
    """Returns where the machine with these facts is kept."""
    told = repr((facts.processor, facts.cores, facts.device_name, facts.versions["torch"]))
    if (precision := facts.versions[FP32_PRODUCTS]) != EXACT:
        told += precision
    word = re.sub(r"[^a-z0-9]+", "-", facts.device_name.lower()).strip("-")[:40]
    return folder() / f"{facts.device}-{word}-{hashlib.sha256(told.encode()).hexdigest()[:8]}.json"


def kept_machine(device: str | torch.device) -> MachineFile | None:
    """Returns what was kept of this machine with ``device``, or None: never measured, or measured before it changed.

    A file that cannot be read counts as none, for the next probe writes it anew.
    """
    try:
        facts = facts_of(torch.device(device))
        found = MachineFile.read(path_of(facts))
    except (OSError, ValueError):
        return None
    return found if is_same(found, facts) else None


def is_same(machine: MachineFile, facts: Facts) -> bool:
    """Whether a file is of the machine with these facts, and says what calls take of it as a probe does today."""
    memory = facts.host_memory_bytes
    return (
        (machine.threads is not None or not machine.is_host)
        and (machine.device, machine.device_name, machine.processor, machine.cores)
        == (facts.device, facts.device_name, facts.processor, facts.cores)
        and machine.versions.get("torch") == facts.versions["torch"]
        and machine.versions.get(FP32_PRODUCTS, EXACT) == facts.versions[FP32_PRODUCTS]
        and abs(machine.host_memory_bytes - memory) <= SAME_MEMORY * memory
    )


def directory_there(path: str | os.PathLike[str]) -> str:
    """Returns the real path of a directory, or of the nearest one above it that is there: it is on that one's disk."""
    found = Path(os.path.realpath(path))
    while not found.exists() and found != found.parent:
        found = found.parent
    return str(found)


def disk_of(machine: MachineFile, path: str) -> Mapping[str, Spread] | None:
    """Returns what the disk at ``path`` does: what was measured there, or above it on the same device."""
    for known in sorted(machine.disks, key=len, reverse=True):
        try:
            same = os.stat(known).st_dev == os.stat(directory_there(path)).st_dev
        except OSError:
            continue
        if same and Path(path).is_relative_to(known):
            return machine.disks[known]
    return machine.disks.get(path)


def check_can_keep(facts: Facts) -> None:
    """Raises StrongholdError where the machine with these facts could not be kept: before it is measured."""
    path = path_of(facts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise _unwritable(path, error) from error


def keep_machine(machine: MachineFile, facts: Facts) -> Path:
    """Writes the machine's file and returns its path. Raises StrongholdError where it cannot be written."""
    path = path_of(facts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        machine.write(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def _unwritable(path: Path, error: OSError) -> StrongholdError:
    return StrongholdError(
        f"what is measured must be kept in {path.parent} (got {error.strerror or error}); have that "
        "directory take a file, or pass keep=False (--no-keep) and write the result to a file of your own (-o)"
    )
