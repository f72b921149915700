"""The Triton kernel compiled: other scalars compile nothing anew, and every operation is rounded as IEEE 754 says."""

import re
from dataclasses import replace

import pytest
import torch

from stronghold.native import BLOCK, Segment
from tests.crossed import crossed
from tests.optim.test_adamw_on_device import GRADIENTS, MOMENTS, WEIGHTS, segment

triton = pytest.importorskip("triton", reason="needs triton: pip install triton")

from triton.backends import backends  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

from stronghold.optim import triton_adamw  # noqa: E402


class Recorded:
    """Stands for the kernel and keeps what it is launched with."""

    def __getitem__(self, grid):
        self.grid = grid
        return self.launch

    def launch(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs


def bound(segments: list[Segment], monkeypatch, target, squares=None):
    """Returns the backend, and what Triton chooses a compiled kernel by for segments of one launch: its cache's key."""
    kernel, recorded = triton_adamw.adamw_of_segments, Recorded()
    with monkeypatch.context() as patch:
        patch.setattr(triton_adamw, "adamw_of_segments", recorded)
        triton_adamw.launch_all(segments, squares)
    backend = triton.compiler.make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    return backend, recorded.kwargs, *binder(*recorded.args, **recorded.kwargs)


needs_nvidia = pytest.mark.skipif("nvidia" not in backends, reason="this triton does not compile for NVIDIA")
needs_jit = pytest.mark.skipif(
    not isinstance(triton_adamw.adamw_of_segments, JITFunction), reason="TRITON_INTERPRET is set: nothing is compiled"
)
HOPPER = triton.backends.compiler.GPUTarget("cuda", 90, 32)


@needs_nvidia
@needs_jit
@MOMENTS
def test_other_scalars_do_not_compile_anew(states, monkeypatch):
    one = segment((4096,), states=states)
    *_, key, options = bound([one], monkeypatch, HOPPER)
    late = 2**30 + 1
    changes = [
        {"step": 2},
        {"step": 16},
        {"step": late},
        {"lr": 0.0},
        {"lr": 1.0},
        {"weight_decay": 0.0},
        {"grad_scale": 0.5},
    ]
    changes += [{"first": 2**33}, {"beta1": 0.0}, {"eps": 1.0}]
    for change in changes:
        *_, other, other_options = bound([replace(one, **change)], monkeypatch, HOPPER)
        assert (other, other_options) == (key, options), change
    *_, other, _ = bound([segment((4097,), states=states)], monkeypatch, HOPPER)
    assert other != key  # the comparison can fail: a length that is no multiple of 16 is compiled for itself


@needs_nvidia
@needs_jit
@MOMENTS
def test_other_addresses_and_lengths_do_not_compile_anew(states, monkeypatch):
    """Wherever segments lie: five, six, seven and eight of them are launched by one kernel."""
    memory = torch.zeros(8, 5000)

    def launched(lengths: list[int], shift: int) -> object:
        segments = [replace(segment((n,), states=states), grad=memory[i, shift:][:n]) for i, n in enumerate(lengths)]
        *_, key, options = bound(segments, monkeypatch, HOPPER, list(torch.zeros(8).unbind()))
        return key, options

    aligned = launched([64] * 5, 0)
    assert launched([4096, 64, 128, 16, 640, 16], 4) == launched([16] * 7, 8) == aligned
    ragged = launched([64] * 5, 1)
    assert launched([4096, 63, 1, 16, 2, 1, 7, 3], 3) == launched([1] * 8, 2) == ragged
    assert launched([64] * 4, 0) != aligned != ragged


@needs_nvidia
@needs_jit
@pytest.mark.parametrize(
    ("target", "states", "grad", "weight"),
    crossed(((80, 12), (90, 1)), *(kind.args[1] for kind in (MOMENTS, GRADIENTS, WEIGHTS))),
)
def test_it_compiles_to_operations_that_round_as_ieee_754_says(target, states, grad, weight, monkeypatch, tmp_path):
    """Products and sums that no compiler fuses, correct roots and quotients, denormal numbers; and wide loads."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    capability, count = target
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    squares = list(torch.zeros(count, dtype=torch.float64).unbind())
    given = [segment((4096,), weight, grad, states) for _ in range(count)]
    backend, kwargs, arguments, key, options = bound(given, monkeypatch, target, squares=squares)
    kernel = triton_adamw.adamw_of_segments
    options, signature, constants, attributes = kernel._pack_args(backend, dict(kwargs), arguments, key, options)
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    ptx = triton.compile(source, target=target, options=options.__dict__).asm["ptx"]

    assert not options.enable_fp_fusion  # which ptxas is told too
    operations = set(re.findall(r"\b((?:add|sub|mul|fma|div|sqrt|rsqrt|rcp|ex2)\.[\w.]*f(?:32|64))\b", ptx))
    # With fp32 moments fused where it is written, with 8-bit moments nowhere.
    others = {"fma.rn.f32"} if states == "fp32" else {"sub.rn.f32"}
    assert operations == {"add.rn.f32", "mul.rn.f32", "sqrt.rn.f32", "div.rn.f32"} | others
    elements = triton_adamw.ROWS * BLOCK // (4 * 32)
    assert len(re.findall(r"div\.rn\.f32", ptx)) == len(re.findall(r"sqrt\.rn\.f32", ptx)) == elements
    assert "ftz" not in ptx
    wide = len(re.findall(r"ld\.global\.v[24]\.b32", ptx))
    assert wide >= (3 if states == "8bit" else 6)
    assert not re.search(r"ld\.global\.b(16|32)", ptx)  # four elements at a time, and more
