"""What benchmarks/adamw.py measures: the bound, our formats, torch's fused AdamW and DeepSpeed's CPU Adam."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from adamw_check import BETA1, BETA2, EPS, LR, WEIGHT_DECAY, State
from torch import Tensor

from stronghold import native
from stronghold.device.memory import HostBuffer

FIRST_STEP = 100  # as in the middle of training: moments are shared, and see more than one update a round
STAGGER_BYTES = 8192
NAMES = {
    "bound": "the bound",
    "fp32": "stronghold, fp32",
    "split": "stronghold, bf16 + remainder",
    "8bit": "stronghold, that, 8-bit moments",
    "torch": "torch fused, fp32",
    "deepspeed": "DeepSpeed, fp32",
    "deepspeed_offload": "DeepSpeed, fp32 and bf16 copy",
    "deepspeed_offload_grad": "DeepSpeed, that and bf16 gradients",
    "deepspeed_no_master": "DeepSpeed, bf16 without master",
}


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to do the step: ``run`` is what is timed and takes the number of the step.

    ``moved_bytes`` are read and written per parameter; of ``state``, which the bound has none of, the results are
    checked, and held to what our kernels promise where it is ``ours``.
    """

    key: str
    moved_bytes: float
    run: Callable[[int], object]
    state: State | None = None
    ours: bool = False

    @property
    def name(self) -> str:
        return NAMES[self.key]


class Buffers:
    """The arrays that all contenders work on, in one piece of memory, allocated as the library allocates it."""

    def __init__(self, parameters: int, *, huge_pages: bool) -> None:
        n = parameters
        self._memory, self._used_bytes = HostBuffer(self.needed_bytes(n)), 0
        if huge_pages:
            advise_huge_pages(self._memory.flat)
        generator = torch.Generator().manual_seed(0)
        # What AdamW works on in fp32; the moments are shared with the formats that keep them in fp32, too.
        self.weight = self._take(n, torch.float32).normal_(std=0.02, generator=generator)
        self.grad = self._take(n, torch.float32).normal_(std=1e-3, generator=generator)
        self.moments = {name: self._take(n, torch.float32).zero_() for name in ("exp_avg", "exp_avg_sq")}
        # The bound leaves numbers of its own behind; only the gradient, which it reads, is the others'.
        self.streamed = [self._take(n, torch.float32).fill_(1.0) for _ in range(3)]
        self.grad_bf16 = self._take(n, torch.bfloat16).copy_(self.grad)
        self.weight_bf16 = self._take(n, torch.bfloat16).copy_(self.weight)
        # Our split weight, and our 8-bit moments, of which zeros are zero.
        self.high = self._take(n, torch.bfloat16).copy_(self.weight)
        self.low = self._take(n, torch.int16).zero_()
        codes = [self._take(n, torch.uint8).zero_() for _ in range(2)]
        exponents = [self._take(-(-n // native.BLOCK), torch.uint8).zero_() for _ in range(2)]
        self.moments_8bit = {
            name: native.Blocks(codes=c, exponents=e) for name, c, e in zip(self.moments, codes, exponents, strict=True)
        }

    @staticmethod
    def needed_bytes(parameters: int) -> int:
        return parameters * (7 * 4 + 4 * 2 + 2) + 2 * -(-parameters // native.BLOCK) + 32 * STAGGER_BYTES

    def _take(self, count: int, dtype: torch.dtype) -> Tensor:
        # AMD's Zen predicts the way of its first cache from a hash of the address (Lipp et al., "Take A Way", AsiaCCS
        # 2020): arrays whose distance is a large power of two push one another out, and torch's kernel then takes
        # twice as long. Layers do not lie like that, so each array begins two pages later than it would.
        begin_bytes = -(-self._used_bytes // 4096) * 4096 + STAGGER_BYTES
        self._used_bytes = begin_bytes + count * dtype.itemsize
        return self._memory.view(begin_bytes, (count,), dtype)


def advise_huge_pages(memory: Tensor) -> None:
    """Asks the kernel for huge pages for ``memory``. Raises OSError where it refuses."""
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if advise(memory.data_ptr(), memory.numel(), mmap.MADV_HUGEPAGE):
        raise OSError(ctypes.get_errno(), "the kernel refuses huge pages; run without --huge-pages")


def our_contenders(buffers: Buffers, threads: int) -> list[Contender]:
    """Returns the bound and the kernel's formats."""

    def contender(key: str, moved_bytes: float, **tensors: Any) -> Contender:
        def run(step: int) -> None:
            segment = native.Segment(
                **tensors, lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS, weight_decay=WEIGHT_DECAY, step=step
            )
            native.adamw([segment], threads=threads)

        return Contender(key=key, moved_bytes=moved_bytes, run=run, state=State(**tensors), ours=True)

    def stream(step: int) -> None:
        weight, exp_avg, exp_avg_sq = buffers.streamed
        native.stream(weight, buffers.grad, exp_avg, exp_avg_sq, threads=threads)

    halves = {"weight": buffers.high, "remainder": buffers.low, "grad": buffers.grad_bf16}
    return [
        Contender(key="bound", moved_bytes=28, run=stream),
        contender("fp32", 28, weight=buffers.weight, grad=buffers.grad, **buffers.moments),
        contender("split", 26, **halves, **buffers.moments),
        contender("8bit", 14 + 4 / native.BLOCK, **halves, **buffers.moments_8bit),
    ]


def torch_contender(buffers: Buffers) -> Contender:
    """Returns torch's fused AdamW on one large fp32 parameter."""
    parameter = torch.nn.Parameter(buffers.weight)
    parameter.grad = buffers.grad
    optimizer = torch.optim.AdamW(
        [parameter], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )
    optimizer.state[parameter] = {"step": torch.tensor(FIRST_STEP - 1.0), **buffers.moments}
    state = State(weight=buffers.weight, grad=buffers.grad, **buffers.moments)
    return Contender(key="torch", moved_bytes=28, run=lambda step: optimizer.step(), state=state)


def deepspeed_contenders(buffers: Buffers) -> list[Contender]:
    """Returns DeepSpeed's CPU Adam in fp32, as ZeRO-Offload uses it for a bf16 model, and on bf16 weights alone.

    After DeepSpeed 0.19.8. runtime/zero/stage_1_and_2.py, step(), the branch of ``self.cpu_offload``: _optimizer_step()
    is DeepSpeedCPUAdam.step() on the flat fp32 master and its fp32 gradient; then a pass of its own over host memory,
    ``bit16_partition_buffer.data.copy_(fp32_partition.data)``, makes the bf16 weights (stage3.py does it in
    _reassign_or_swap_out_partitioned_parameters()). The kernel's own copy-back of earlier versions is commented out
    there, as not working correctly, and DeepSpeedCPUAdam no longer has it.

    Who converts the bf16 gradient depends on where it is: async_inplace_copy_grad_to_fp32_buffer_from_gpu() (stage3.py:
    _offload_grad_partition_at_boundary()) converts it there and copies four bytes an element to the host. On a GPU that
    is no work of the host's, but twice the bytes over the bus; a gradient that is on the host in bf16, as ours is,
    costs another pass. Both are measured. Clipping is one more pass in unscale_and_clip_grads() and a factor in our
    step; it is left out.

    Without a master (``bf16_master_weights_and_grads``: only the moments are fp32) fewer bytes move than in any format
    of ours with fp32 moments, and updates below half a bf16 ulp are lost: not the same arithmetic, so no target.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # nothing here needs a GPU, nor its compiler
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # for ninja
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    def adam(weight: Tensor, grad: Tensor) -> Callable[[], object]:
        parameter = torch.nn.Parameter(weight)
        parameter.grad = grad
        optimizer = DeepSpeedCPUAdam(
            [parameter],
            lr=LR,
            betas=(BETA1, BETA2),
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            adamw_mode=True,
            fp32_optimizer_states=True,
        )
        optimizer.state[parameter] = {"step": FIRST_STEP - 1, **buffers.moments}
        return optimizer.step

    plain, offload, offload_grad = (adam(buffers.weight, buffers.grad) for _ in range(3))
    without_master = adam(buffers.weight_bf16, buffers.grad_bf16)

    def run_offload(step: int) -> None:
        offload()
        buffers.weight_bf16.copy_(buffers.weight)

    def run_offload_grad(step: int) -> None:
        buffers.grad.copy_(buffers.grad_bf16)
        offload_grad()
        buffers.weight_bf16.copy_(buffers.weight)

    fp32 = State(weight=buffers.weight, grad=buffers.grad, **buffers.moments)
    return [
        Contender(key="deepspeed", moved_bytes=28, run=lambda step: plain(), state=fp32),
        Contender(
            key="deepspeed_offload",
            moved_bytes=28 + 6,
            run=run_offload,
            state=replace(fp32, copy=buffers.weight_bf16),
        ),
        Contender(
            key="deepspeed_offload_grad",
            moved_bytes=6 + 28 + 6,
            run=run_offload_grad,
            state=replace(fp32, copy=buffers.weight_bf16, grad=buffers.grad_bf16),
        ),
        Contender(
            key="deepspeed_no_master",
            moved_bytes=22,
            run=lambda step: without_master(),
            state=State(weight=buffers.weight_bf16, grad=buffers.grad_bf16, **buffers.moments),
        ),
    ]
