"""Kernels on the threads that PyTorch computes with, which spin behind its last operator and are there at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from stronghold.native.extension import _C

_FOUND = "ATen parallel backend: OpenMP" in torch.__config__.parallel_info() and _C.find_openmp(
    str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
)
"""Whether PyTorch computes with an OpenMP whose teams others may use; so it is on Linux."""


def in_team(task: Callable[[], object]) -> None:
    """Runs ``task``, which calls kernels; called in a thread in which PyTorch has computed.

    Kernels that are called with as many threads as PyTorch has, or up to twice as many, are computed by those, others
    by the pool's. A thread of the pool would first wait for a core: behind an operator PyTorch's spin on all of them
    for milliseconds.
    """
    if _FOUND:
        _C.in_team(torch.get_num_threads(), task)
    else:
        task()
