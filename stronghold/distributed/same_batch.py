"""Whether all processes of a model in stages pass the same batch."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from stronghold.distributed.processes import Processes
from stronghold.native import crc32c


def check_same_batch(processes: Processes, inputs: Tensor, targets: Tensor, *, training: bool, changed: bool) -> bool:
    """Raises ParallelError unless all processes pass the same batch to the same call; tells if any has ``changed``.

    What is on a device is copied to the host, for a checksum of its bytes.
    """
    kinds, values = (kind_of(inputs), kind_of(targets)), (_crc(inputs), _crc(targets))
    same, any_changed = processes.same(zlib.crc32(repr((kinds, values, training)).encode()), changed=changed)
    if not same:
        processes.agree({"batch": kinds, "call": training})
        processes.refuse(
            "all processes must pass the same batch (got one with other values in some); where a DataLoader shuffles "
            "pass generator=torch.Generator().manual_seed(...), the same in each, for torch's own random numbers are "
            "each process's"
        )
    return any_changed


def kind_of(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    """Returns the shape and the dtype of a batch."""
    return tuple(tensor.shape), str(tensor.dtype)


def _crc(tensor: Tensor) -> int:
    return crc32c(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))
