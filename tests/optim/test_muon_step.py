"""Muon's arithmetic beside torch.optim.Muon, bit for bit, in whole matrices and in pieces."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

from stronghold.optim.muon_groups import COEFFICIENTS, MUON_DEFAULTS
from stronghold.optim.muon_step import (
    PART,
    Direction,
    MomentumSegment,
    StepSegment,
    adjusted_lr,
    newton_schulz,
    newton_schulz_bytes,
)
from stronghold.split import join, split

SHAPES = [(8, 24), (24, 8), (16, 16), (1, 7), (7, 1), (64, 96)]
SETTINGS = [
    {},
    {"nesterov": False},
    {"momentum": 0.0},
    {"adjust_lr_fn": "match_rms_adamw"},
    {"adjust_lr_fn": "original", "weight_decay": 0.0},
    {"ns_steps": 0},
    {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1.0},
]
STEPS = 6


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_newton_schulz_is_torchs(shape, steps):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = _zeropower_via_newtonschulz(matrix, COEFFICIENTS, steps, 1e-7)
    got = newton_schulz(matrix.bfloat16(), coefficients=COEFFICIENTS, steps=steps, eps=1e-7)
    assert got.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(got, expected)


@pytest.mark.parametrize("shape", [(32, 32), (16, 48), (48, 16)], ids=str)
def test_newton_schulz_keeps_the_singular_vectors(shape):
    """Its values come to between about 0.7 and 1.2; beside the polar factor that LAPACK finds in float64."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2)).double()
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    wanted = values > 0.05 * values.max()
    got = newton_schulz(matrix.bfloat16(), coefficients=COEFFICIENTS, steps=5, eps=1e-7).double()
    near = (left.T @ got @ right.T)[wanted][:, wanted]
    assert ((near.diagonal() > 0.6) & (near.diagonal() < 1.3)).all()
    assert (near - near.diagonal().diag()).abs().max() < 0.05


def test_the_memory_of_an_iteration_is_four_matrices_at_most():
    assert newton_schulz_bytes((10, 40)) == newton_schulz_bytes((40, 10)) == 2 * (2 * 400 + 2 * 100)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        (None, (8, 2), 0.02),
        ("original", (2, 8), 0.01),
        ("match_rms_adamw", (3, 25), 0.01),
        ("match_rms_adamw", (25, 3), 0.01),
    ],
)
def test_the_learning_rate_is_adjusted_to_the_shape(name, shape, expected):
    assert adjusted_lr(0.01, name, shape) == pytest.approx(expected, rel=1e-15)


def segments_of(
    weight: Tensor, remainder: Tensor | None, grad: Tensor, buffer: Tensor, **of: object
) -> tuple[MomentumSegment, StepSegment]:
    settings = {**MUON_DEFAULTS, **of}
    values = torch.empty(weight.shape, dtype=torch.bfloat16)
    direction = Direction(
        values,
        coefficients=settings["ns_coefficients"],  # type: ignore[arg-type]
        steps=settings["ns_steps"],  # type: ignore[arg-type]
        eps=settings["eps"],  # type: ignore[arg-type]
    )
    lr: float = settings["lr"]  # type: ignore[assignment]
    return (
        MomentumSegment(
            direction=direction,
            values=values,
            grad=grad,
            grad_remainder=None,
            momentum_buffer=buffer,
            momentum=settings["momentum"],  # type: ignore[arg-type]
            nesterov=settings["nesterov"],  # type: ignore[arg-type]
        ),
        StepSegment(
            direction=direction,
            values=values,
            weight=weight,
            remainder=remainder,
            lr=adjusted_lr(lr, settings["adjust_lr_fn"], weight.shape),  # type: ignore[arg-type]
            decay=lr * settings["weight_decay"],  # type: ignore[operator]
        ),
    )


def run(segments, cuts: tuple[int, ...]) -> None:
    """Runs them cut at some elements, each for itself, as a disk's ring does."""
    for segment in segments:
        bounds = (0, *(cut for cut in cuts if cut < segment.elements), segment.elements)
        for begin, end in pairwise(bounds):
            segment.part(begin, end).run()


@pytest.mark.parametrize("cuts", [(), (1, 5, 64, 700)], ids=["whole", "in pieces"])
@pytest.mark.parametrize("halves", [False, True], ids=["fp32", "bf16 and remainder"])
@pytest.mark.parametrize("of", SETTINGS, ids=str)
def test_steps_are_torchs_to_the_bit(of, halves, cuts):
    generator = torch.Generator().manual_seed(3)
    for shape in SHAPES:
        start = torch.randn(shape, generator=generator)
        expected = nn.Parameter(start.clone())
        torchs = torch.optim.Muon([expected], lr=0.02, **of)
        weight, remainder, buffer = start.clone(), None, torch.zeros(shape)
        if halves:
            weight, remainder = weight.bfloat16(), torch.empty(shape, dtype=torch.int16)
            split(start, weight, remainder)
        for _ in range(STEPS):
            grad = torch.randn(shape, generator=generator)
            expected.grad = grad.bfloat16().float() if halves else grad
            torchs.step()
            given = grad.bfloat16() if halves else grad
            run(segments_of(weight, remainder, given, buffer, lr=0.02, **of), cuts)
            got = weight if remainder is None else join(weight, remainder)
            assert torch.equal(got, expected), shape
            assert torch.equal(buffer, torchs.state[expected]["momentum_buffer"]), shape


def test_a_large_matrix_is_worked_on_in_parts():
    shape = (2, PART)  # two parts
    generator = torch.Generator().manual_seed(4)
    expected = nn.Parameter(torch.randn(shape, generator=generator))
    weight, buffer, grad = expected.detach().clone(), torch.zeros(shape), torch.randn(shape, generator=generator)
    expected.grad = grad.clone()
    torchs = torch.optim.Muon([expected])
    torchs.step()
    run(segments_of(weight, None, grad, buffer), ())
    assert torch.equal(weight, expected)
    assert torch.equal(buffer, torchs.state[expected]["momentum_buffer"])


def test_a_gradient_may_be_in_halves_and_is_scaled():
    generator = torch.Generator().manual_seed(5)
    grad = torch.randn(6, 10, generator=generator)
    high, low = torch.empty(6, 10, dtype=torch.bfloat16), torch.empty(6, 10, dtype=torch.int16)
    split(grad, high, low)
    expected = nn.Parameter(torch.randn(6, 10, generator=generator))
    weight, buffer = expected.detach().clone(), torch.zeros(6, 10)
    expected.grad = grad * 0.3
    torch.optim.Muon([expected]).step()
    momentum, step = segments_of(weight, None, high, buffer)
    replace(momentum, grad_remainder=low, grad_scale=0.3).run()
    step.run()
    assert torch.equal(weight, expected)


@pytest.mark.parametrize("squares", [float("nan"), float("inf")])
@pytest.mark.parametrize("halves", [False, True])
def test_nothing_changes_where_the_squares_are_not_finite(squares, halves):
    weight, buffer = torch.randn(6, 10), torch.randn(6, 10)
    remainder = None
    if halves:
        values, weight, remainder = weight, weight.bfloat16(), torch.empty(6, 10, dtype=torch.int16)
        split(values, weight, remainder)
    before = [t.clone() for t in (weight, buffer, remainder) if t is not None]
    grad = torch.full((6, 10), float("nan"))
    for segment in segments_of(weight, remainder, grad, buffer):
        replace(segment, squares=torch.tensor(squares, dtype=torch.float64)).run()
    assert all(map(torch.equal, before, [t for t in (weight, buffer, remainder) if t is not None]))
    grad.fill_(1.0)
    for segment in segments_of(weight, remainder, grad, buffer):
        replace(segment, squares=torch.tensor(60.0, dtype=torch.float64)).run()
    assert not torch.equal(before[1], buffer)
    assert not torch.equal(before[0], weight)
