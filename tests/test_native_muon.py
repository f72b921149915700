"""The host's kernels for Muon beside PyTorch's operations, bit for bit, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stronghold import native
from stronghold.optim.muon_step import Direction, MomentumSegment, StepSegment
from stronghold.split import split
from tests.native_cases import CHUNK, ISAS

LENGTHS = (0, 1, 7, 8, 33, 1000, CHUNK + 5)
EXTREMES = (0.0, -0.0, 1.0, -1.0, 1e-40, 3e38, -3e38, 1.00390625, 1.01171875, torch.inf)


def numbers(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-12, 4, (count,), generator=generator)
    values[: len(EXTREMES) - 1] = torch.tensor(EXTREMES[:-1])[:count]
    return values


def halves(values: Tensor) -> tuple[Tensor, Tensor]:
    high, low = values.bfloat16(), torch.empty(values.shape, dtype=torch.int16)
    split(values, high, low)
    return high, low


def a_direction(values: Tensor) -> Direction:
    return Direction(values, coefficients=(1.0, 0.0, 0.0), steps=0, eps=1.0)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether the bits are; but for zeros' signs, in which PyTorch's registers and what is left over differ, too."""
    kind = torch.int32 if one.dtype == torch.float32 else torch.int16
    one, other = ((t if t.dtype == torch.int16 else t + 0.0) for t in (one, other))
    return torch.equal(one.view(kind), other.view(kind))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", ["fp32", "bf16", "halves"])
@pytest.mark.parametrize(
    ("momentum", "nesterov", "scale"),
    [(0.95, True, 1.0), (0.95, False, 0.3), (0.4, True, 1.0), (0.5, True, 1.0), (0.0, True, 0.5), (1.0, False, 1.0)],
)
def test_the_momentum_is_torchs_to_the_bit(momentum, nesterov, scale, form, isa):
    for count in LENGTHS:
        grad, low = numbers(count, 1), None
        if form == "bf16":
            grad = grad.bfloat16()
        elif form == "halves":
            grad, low = halves(grad)
        of = {"grad": grad, "grad_remainder": low, "momentum": momentum, "nesterov": nesterov, "grad_scale": scale}
        buffer, values = numbers(count, 2), torch.empty(count, dtype=torch.bfloat16)
        expected = MomentumSegment(
            direction=a_direction(values), values=values, momentum_buffer=buffer.clone(), last=False, **of
        )
        expected.run_in_torch()
        got = native.Momentum(direction=torch.empty_like(values), momentum_buffer=buffer, **of)
        native.muon_momentum(got, threads=2, isa=isa)
        assert same(got.momentum_buffer, expected.momentum_buffer), count
        assert same(got.direction, values), count


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", ["fp32", "halves"])
def test_the_move_is_torchs_to_the_bit(form, isa):
    for count in LENGTHS:
        values = numbers(count, 3).clamp(-2, 2).bfloat16()
        weight, low = numbers(count, 4), None
        if form == "halves":
            weight, low = halves(weight)
        own = [None if t is None else t.clone() for t in (weight, low)]
        expected = StepSegment(
            direction=a_direction(values), values=values, weight=own[0], remainder=own[1], lr=0.0213, decay=0.0017
        )
        expected.run_in_torch()
        piece = native.Moved(direction=values, weight=weight, remainder=low, lr=0.0213, decay=0.0017)
        native.muon_move(piece, threads=2, isa=isa)
        assert same(weight, own[0]), count
        assert low is None or same(low, own[1]), count


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_not_a_number_stays_none(isa):
    grad, buffer = torch.full((40,), torch.nan), torch.zeros(40)
    direction = torch.zeros(40, dtype=torch.bfloat16)
    given = {"grad": grad, "grad_remainder": None, "momentum": 0.9, "nesterov": True}
    native.muon_momentum(native.Momentum(direction=direction, momentum_buffer=buffer, **given), threads=1, isa=isa)
    assert buffer.isnan().all()
    assert direction.isnan().all()


def test_what_a_kernel_does_not_take_is_refused():
    matrix, half = torch.zeros(4, 6), torch.zeros(4, 6, dtype=torch.bfloat16)
    of = {"grad_remainder": None, "momentum": 0.9, "nesterov": True}

    def momentum(**changed):
        native.muon_momentum(
            native.Momentum(**{"direction": half, "grad": matrix, "momentum_buffer": matrix.clone(), **of, **changed}),
            threads=1,
        )

    for changed, match in (
        ({"direction": matrix}, r"direction must be torch\.bfloat16"),
        ({"momentum_buffer": matrix.clone().T}, "momentum_buffer must be contiguous"),
        ({"grad": torch.zeros(3)}, "grad must hold 24 elements"),
        ({"momentum_buffer": matrix}, "overlap"),
    ):
        with pytest.raises(ValueError, match=match):
            momentum(**changed)
    with pytest.raises(ValueError, match="weight is bfloat16 and needs a remainder"):
        native.muon_move(native.Moved(direction=half, weight=half.clone(), remainder=None, lr=1, decay=0), threads=1)
    with pytest.raises(ValueError, match="overlap"):
        low = torch.zeros(4, 6, dtype=torch.int16)
        native.muon_move(native.Moved(direction=half, weight=half, remainder=low, lr=1, decay=0), threads=1)
    with pytest.raises(ValueError, match="threads must be"):
        native.muon_move(native.Moved(direction=half, weight=matrix, remainder=None, lr=1, decay=0), threads=0)
