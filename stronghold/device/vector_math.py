"""PyTorch's elementwise functions on the CPU: each is called once by one thread before several call it together.

oneMKL 2024.2, which PyTorch's wheels have in them, looks for a function's kernel when it is first called. Of threads
that make that call at once, one may compute its part with the least accurate kernel: the first cosines of a process,
those of a rotary embedding, are then wrong by up to 1e-4 for half the positions, without a word, and right ever after
(github.com/pytorch/pytorch/issues/188792).
"""

from __future__ import annotations

import torch

FUNCTIONS = (
    *("abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "floor"),
    *("lgamma", "log", "log10", "log1p", "log2", "round", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)
"""Those that PyTorch has, or once had, from MKL."""


def find_kernels() -> None:
    """Calls each of FUNCTIONS in fp32 and fp64, on so few elements that the calling thread does it alone."""
    for dtype in (torch.float32, torch.float64):
        few = torch.full((2,), 0.5, dtype=dtype, device="cpu")
        for function in FUNCTIONS:
            getattr(few, function)()
