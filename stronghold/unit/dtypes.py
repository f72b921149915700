"""Inputs of another dtype than a unit computes in."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from stronghold.errors import OffloadedModelError, StrongholdError

_OF_DTYPES = re.compile(r"dtype|scalar type|type \(.*should be the same")


def check_mixed(
    error: RuntimeError, name: str, dtype: torch.dtype, inputs: Iterable[Tensor], buffers: Iterable[Tensor] = ()
) -> None:
    """Raises OffloadedModelError from an ``error`` of torch that says two dtypes met: a unit's own and another one.

    That is one of its ``inputs``, or of the ``buffers`` beside its parameters, which keep theirs.
    """
    given, kept = (_floating(tensors) - {dtype} for tensors in (inputs, buffers))
    if not (given or kept) or isinstance(error, StrongholdError) or not _OF_DTYPES.search(str(error)):
        return
    got = [str(one) for one in sorted(given, key=str)] + [f"{one} in its buffers" for one in sorted(kept, key=str)]
    cast = (
        f"cast the batch (batch.to({dtype})), run the model under torch.autocast, pass another dtype= to offload(), or "
    )
    convert = f"convert the buffers, which dtype= leaves as they are (model.to({dtype}) before offload())"
    raise OffloadedModelError(
        f"what is computed with {name} must have its dtype, {dtype} (got {' and '.join(got)}; torch: {error}); "
        f"{cast if given else ''}{convert}"
    ) from error


def _floating(tensors: Iterable[Tensor]) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
