"""Square roots and quotients rounded as IEEE 754 says, denormal numbers too, in the Triton language.

They are Triton's own ``sqrt_rn`` and ``div_rn``. Triton before 3.6 compiles those for NVIDIA to ``sqrt.rn.ftz.f32`` and
``div.rn.ftz.f32``, which take denormal numbers for zero; there the instructions without ``ftz`` are written out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_OLD = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 6)
IN_PTX = tl.constexpr(_OLD and torch.version.hip is None and torch.version.xpu is None)
"""Whether the instructions are written out in PTX, the assembly language of NVIDIA's GPUs."""


@triton.jit
def square_root(x):
    if IN_PTX:
        return tl.inline_asm_elementwise("sqrt.rn.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def quotient(x, y):
    if IN_PTX:
        return tl.inline_asm_elementwise("div.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, is_pure=True, pack=1)
    else:
        return tl.div_rn(x, y)
