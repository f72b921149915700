"""Inputs of another dtype than a unit computes in."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from stronghold.errors import OffloadedModelError, StrongholdError

_OF_DTYPES = re.compile(r"dtype|scalar type|type \(.*should be the same")


def check_mixed(error: RuntimeError, name: str, dtype: torch.dtype, inputs: Iterable[Tensor]) -> None:
    """Raises OffloadedModelError from an ``error`` of torch that says two dtypes met: a unit's own and an input's."""
    others = {tensor.dtype for tensor in inputs if tensor.is_floating_point()} - {dtype}
    if not others or isinstance(error, StrongholdError) or not _OF_DTYPES.search(str(error)):
        return
    got = " and ".join(sorted(map(str, others)))
    raise OffloadedModelError(
        f"what is computed with {name} must have its dtype, {dtype} (got {got}; torch: {error}); cast the batch "
        f"(batch.to({dtype})), run the model under torch.autocast, or pass another dtype= to offload()"
    ) from error
