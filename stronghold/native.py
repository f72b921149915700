"""Typed, checked wrappers around the compiled host kernels; the only importer of ``stronghold._C``."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

try:
    from stronghold import _C
except ImportError as error:
    raise ImportError(
        f"stronghold's compiled kernels (stronghold._C) cannot be imported ({error}); build them with "
        "`pip install .`, or `pip install -e .` to run from the source tree, in the project's root with g++ "
        "installed, under the Python that imports them"
    ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One tensor's share of an AdamW step.

    All tensors are contiguous, on the CPU, hold the same number of elements (their shapes may differ) and
    overlap nowhere. ``weight``, ``exp_avg`` and ``exp_avg_sq`` are float32 and are changed in place; ``grad``
    is float32 or bfloat16; ``low``, where given, is bfloat16 and receives the new weight rounded to nearest
    even. ``step`` counts from 1, this step included. ``grad_scale`` multiplies the gradient in float32 before
    anything else.
    """

    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    low: Tensor | None = None
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: float = 1.0


def adamw(segments: Sequence[Segment], *, threads: int, isa: str = "auto") -> None:
    """Carries out one step of ``torch.optim.AdamW`` on every segment, in place.

    Between load and store the arithmetic is float64. Neither ``threads`` nor ``isa`` changes a bit of the
    result. The interpreter lock is released meanwhile. Raises ValueError before anything is written.
    Decoupled weight decay after Loshchilov & Hutter, ICLR 2019.
    """
    _check_threads(threads)
    isa = _resolve(isa)
    float32, bfloat16 = torch.float32, torch.bfloat16
    calls: list[tuple[object, ...]] = []
    for segment in segments:
        weight, grad, exp_avg, exp_avg_sq = segment.weight, segment.grad, segment.exp_avg, segment.exp_avg_sq
        low = segment.low
        n = weight.numel()
        grad_dtype = grad.dtype
        # One expression for the common case; _refuse finds out and says what is wrong with the others.
        if not (
            weight.is_cpu
            and grad.is_cpu
            and exp_avg.is_cpu
            and exp_avg_sq.is_cpu
            and weight.dtype is float32
            and exp_avg.dtype is float32
            and exp_avg_sq.dtype is float32
            and (grad_dtype is bfloat16 or grad_dtype is float32)
            and grad.numel() == n
            and exp_avg.numel() == n
            and exp_avg_sq.numel() == n
            and weight.is_contiguous()
            and grad.is_contiguous()
            and exp_avg.is_contiguous()
            and exp_avg_sq.is_contiguous()
            and (low is None or (low.is_cpu and low.dtype is bfloat16 and low.numel() == n and low.is_contiguous()))
            and segment.step >= 1
        ):
            _refuse(segment, len(calls))
        calls.append(
            (
                weight.data_ptr(),
                grad.data_ptr(),
                grad_dtype is bfloat16,
                exp_avg.data_ptr(),
                exp_avg_sq.data_ptr(),
                0 if low is None else low.data_ptr(),
                n,
                segment.lr,
                segment.beta1,
                segment.beta2,
                segment.eps,
                segment.weight_decay,
                segment.step,
                segment.grad_scale,
            )
        )
    _C.adamw(calls, threads, isa)


def squared_norm(tensors: Sequence[Tensor], *, threads: int, isa: str = "auto") -> float:
    """Returns the sum of squares of all elements, computed in float64.

    ``tensors`` are float32 or bfloat16, contiguous and on the CPU. Neither ``threads`` nor ``isa`` changes a
    bit of the result. It is finite if and only if every element is: NaN and infinities show. The interpreter
    lock is released meanwhile. Raises ValueError for tensors that do not fit.
    """
    _check_threads(threads)
    isa = _resolve(isa)
    spans = []
    for index, tensor in enumerate(tensors):
        _check_tensor(f"tensor {index}", tensor, (torch.float32, torch.bfloat16))
        spans.append((tensor.data_ptr(), tensor.dtype is torch.bfloat16, tensor.numel()))
    return _C.squared_norm(spans, threads, isa)


def available_isas() -> tuple[str, ...]:
    """Returns the instruction sets that the kernels can use on this processor, the plainest first."""
    return _AVAILABLE


def best_isa() -> str:
    """Returns what ``isa="auto"`` stands for: the last of :func:`available_isas`."""
    return _BEST


def usable_cores() -> int:
    """Returns how many threads can run at once: 1 or more, within CPU affinity and the cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    # A quota of 2.5 cores is spent by three threads before the period ends, and all three then stand still.
    return cores if quota >= cores else max(1, math.floor(quota))


_AVAILABLE = tuple(_C.available_isas())
_BEST = _C.best_isa()


def _cgroup_quota(memberships: Path, root: Path) -> float:
    """Returns the cores that the cgroups above this process grant it, infinity where they set no limit.

    ``memberships`` is /proc/self/cgroup, one ``id:controllers:path`` per line; version 2 has an empty list of
    controllers. In a container the path may not exist under ``root``, whose own files are the container's.
    """
    try:
        lines = memberships.read_text().splitlines()
    except OSError:
        return math.inf
    quota = math.inf
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, read = root, _quota_v2
        elif "cpu" in controllers.split(","):
            mount, read = root / "cpu", _quota_v1
        else:
            continue
        group = Path(path.lstrip("/"))
        for directory in (group, *group.parents):
            quota = min(quota, read(mount / directory))
    return quota


def _quota_v2(directory: Path) -> float:
    try:
        quota, period = (directory / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return math.inf


def _quota_v1(directory: Path) -> float:
    try:
        quota = int((directory / "cpu.cfs_quota_us").read_text())
        return math.inf if quota <= 0 else quota / int((directory / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return math.inf


def _check_threads(threads: int) -> None:
    if not isinstance(threads, int) or threads < 1:
        raise ValueError(f"threads must be an integer of 1 or more (got {threads!r}); pass usable_cores()")


def _resolve(isa: str) -> str:
    if isa == "auto":
        return _BEST
    if isa not in _AVAILABLE:
        raise ValueError(
            f"isa must be one that this processor runs (got {isa!r}, it runs {', '.join(_AVAILABLE)}); pass 'auto'"
        )
    return isa


def _check_tensor(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if not tensor.is_cpu:
        raise ValueError(f"{name} must be on the CPU (got {tensor.device}); copy it to the host first")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} must be {allowed} (got {tensor.dtype}); convert it first")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous (got shape {tuple(tensor.shape)} with strides {tensor.stride()}); "
            "pass the storage that it views, or a contiguous copy and copy the result back"
        )


def _refuse(segment: Segment, index: int) -> None:
    """Raises ValueError for the first rule that ``segment``, the ``index``-th of its call, breaks."""
    prefix = f"segment {index}: "
    float32 = (torch.float32,)
    _check_tensor(f"{prefix}weight", segment.weight, float32)
    _check_tensor(f"{prefix}grad", segment.grad, (torch.float32, torch.bfloat16))
    _check_tensor(f"{prefix}exp_avg", segment.exp_avg, float32)
    _check_tensor(f"{prefix}exp_avg_sq", segment.exp_avg_sq, float32)
    if segment.low is not None:
        _check_tensor(f"{prefix}low", segment.low, (torch.bfloat16,))
    lengths = {
        name: tensor.numel()
        for name in ("weight", "grad", "exp_avg", "exp_avg_sq", "low")
        if (tensor := getattr(segment, name)) is not None
    }
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(
            f"{prefix}all tensors must hold the same number of elements (got {listed}); pass matching ones"
        )
    if segment.step < 1:
        raise ValueError(f"{prefix}step counts from 1 (got {segment.step}); increase it before the update")
    raise AssertionError(f"segment {index} was refused without a reason")
