"""Sums of gradients and of their squares: against numpy, on the host's path and on the one of other devices."""

import math

import numpy as np
import pytest
import torch

from stronghold import native
from stronghold.split import join, split
from stronghold.window import sums
from stronghold.window.sums import add, write_squares

NAN, INFINITY = math.nan, math.inf
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


class Elsewhere(torch.Tensor):
    """A tensor in host memory that says it is on another device: the way of a GPU, without one."""

    is_cpu = False
    __torch_function__ = torch._C._disabled_torch_function_impl


PLACES = pytest.mark.parametrize(
    "place", [lambda tensor: tensor, lambda tensor: tensor.as_subclass(Elsewhere)], ids=["host", "elsewhere"]
)


def spread(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10 ** (torch.rand(shape, generator=generator) * 8 - 5)


def exact(tensor: torch.Tensor) -> float:
    return math.fsum(float(x) ** 2 for x in tensor.double().flatten().tolist())


def numbers(count: int) -> list[torch.Tensor]:
    return [torch.full((), -1.0, dtype=torch.float64) for _ in range(count)]


# ---- squares ----


@PLACES
@DTYPES
def test_each_gradients_squares_are_its_own(dtype, place):
    gradients = [spread(*shape, seed=i).to(dtype) for i, shape in enumerate([(300, 7), (), (1,), (0, 3), (4, 5, 6)])]
    targets = numbers(len(gradients))
    write_squares([place(g) for g in gradients], targets, threads=2)
    for target, gradient in zip(targets, gradients, strict=True):
        assert target.item() == pytest.approx(exact(gradient), rel=1e-12 if place(gradient).is_cpu else 3e-6)


def test_on_the_host_they_are_summed_in_float64():
    """A fp32 sum of 2 ** 24 and ones stands still."""
    gradient = torch.ones(20_000)
    gradient[0] = 2.0**12
    (target,) = numbers(1)
    write_squares([gradient], [target], threads=1)
    assert target.item() == 2.0**24 + 19_999


@DTYPES
def test_the_cut_changes_no_bit(dtype):
    gradient = spread(200_003, seed=3).to(dtype)
    found = set()
    for threads in (1, 2, 5):
        (target,) = numbers(1)
        write_squares([gradient], [target], threads=threads)
        found.add(target.item())
    assert len(found) == 1


@PLACES
def test_the_targets_may_lie_behind_the_gradients_in_one_buffer(place):
    flat = torch.zeros(256, dtype=torch.uint8)
    gradients = [flat[:36].view(torch.float32), flat[64:96].view(torch.bfloat16)]
    gradients[0].fill_(3.0)
    gradients[1].fill_(0.5)
    targets = [flat[128:136].view(torch.float64).view(()), flat[136:144].view(torch.float64).view(())]
    write_squares([place(g) for g in gradients], targets, threads=1)
    assert flat[128:144].view(torch.float64).tolist() == [81.0, 4.0]
    assert (gradients[0] == 3.0).all() and (gradients[1] == 0.5).all()
    assert not flat[144:].any() and not flat[96:128].any()


@PLACES
@DTYPES
@pytest.mark.parametrize("bad", [NAN, INFINITY, -INFINITY])
@pytest.mark.parametrize("where", [0, 5, -1])
def test_one_element_that_is_not_finite_shows_and_only_in_its_own_sum(where, bad, dtype, place):
    gradients = [spread(130, seed=i).to(dtype) for i in range(3)]
    gradients[1][where] = bad
    targets = numbers(3)
    write_squares([place(g) for g in gradients], targets, threads=1)
    assert [math.isfinite(target.item()) for target in targets] == [True, False, True]


@PLACES
@pytest.mark.parametrize("bad", [NAN, INFINITY, -INFINITY])
def test_found_inf_spreads_from_the_first_that_is_not_finite_on(bad, place):
    """All of a call's gradients belong to one layer; what came before it stays as it was."""
    found_inf = torch.zeros((), dtype=torch.float64)
    layers = [[spread(40, seed=2 * i), spread(3, 5, seed=2 * i + 1)] for i in range(4)]
    layers[2][1][1, 1] = bad
    found = []
    for gradients in layers:
        targets = numbers(2)
        write_squares([place(g) for g in gradients], targets, 1, found_inf)
        found.append(targets)
    for number, (targets, gradients) in enumerate(zip(found, layers, strict=True)):
        for target, gradient in zip(targets, gradients, strict=True):
            if number < 2:
                assert target.item() == pytest.approx(exact(gradient), rel=1e-6)
            else:
                assert math.isnan(target.item())
    assert math.isnan(found_inf.item())


@PLACES
def test_found_inf_of_nothing_changes_no_bit(place):
    gradients = [spread(65, seed=i).bfloat16() for i in range(3)]
    found_inf, with_it, without = torch.zeros((), dtype=torch.float64), numbers(3), numbers(3)
    write_squares([place(g) for g in gradients], with_it, 1, found_inf)
    write_squares([place(g) for g in gradients], without, 1)
    assert [t.item() for t in with_it] == [t.item() for t in without]
    assert found_inf.item() == 0.0


# ---- sums ----


def halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    high, low = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    split(values, high, low)
    return high, low


@PLACES
@pytest.mark.parametrize("shape", [(1000,), (), (0,), (7, 13)], ids=str)
def test_fp32_sums_are_numpys(shape, place):
    target = spread(*shape)
    expected = target.numpy().copy()
    for seed in range(1, 30):
        source = spread(*shape, seed=seed)
        squares = add([place(target)], [None], [source], threads=2)[0]
        expected = expected + source.numpy()
        assert expected.dtype == np.float32
        assert torch.equal(target, torch.from_numpy(np.asarray(expected)))
        assert squares.dtype is torch.float64
        assert squares.item() == pytest.approx(exact(target), rel=1e-12 if place(target).is_cpu else 3e-6)


@PLACES
@pytest.mark.parametrize("shape", [(1000,), (), (0,), (7, 13)], ids=str)
def test_bf16_gradients_are_added_in_fp32_bit_for_bit(shape, place):
    target, remainder = spread(*shape).bfloat16(), torch.zeros(shape, dtype=torch.int16)
    expected = target.float().numpy().copy()
    for seed in range(1, 30):
        source = spread(*shape, seed=seed).bfloat16()
        kept = source.clone()
        squares = add([place(target)], [remainder], [source], threads=1)[0]
        expected = np.asarray(expected + source.float().numpy())
        total = join(target, remainder)
        assert torch.equal(total, torch.from_numpy(expected))
        assert torch.equal(target, halves(total)[0]), "what is shown is the sum's nearest bf16 number"
        assert torch.equal(source, kept)
        assert squares.item() == pytest.approx(exact(total), rel=1e-12 if place(target).is_cpu else 3e-6)


@pytest.mark.parametrize("shape", [(1000,), (7, 150), (64,), (65,)], ids=str)
def test_a_sum_in_two_halves_is_the_same_in_parts_as_whole(shape, monkeypatch):
    found = []
    for part in (10**6, 64):
        monkeypatch.setattr(sums, "PART", part)
        target, remainder = (half.as_subclass(Elsewhere) for half in halves(spread(*shape)))
        squares = add([target], [remainder], [spread(*shape, seed=1).bfloat16()], threads=1)
        found.append((join(target, remainder), squares))
    assert torch.equal(found[0][0], found[1][0])
    assert found[1][1].item() == pytest.approx(exact(found[0][0]), rel=3e-6)


@PLACES
def test_many_small_bf16_gradients_are_not_lost(place):
    target, remainder = torch.zeros(70, dtype=torch.bfloat16), torch.zeros(70, dtype=torch.int16)
    for _ in range(2000):
        add([place(target)], [remainder], [torch.full((70,), 1 / 512).bfloat16()], threads=1)
    assert torch.equal(join(target, remainder), torch.full((70,), 2000 / 512))


@PLACES
@DTYPES
@pytest.mark.parametrize("bad", [NAN, INFINITY])
def test_what_is_not_finite_shows_in_the_sum_and_in_its_squares(bad, dtype, place):
    target = spread(66).to(dtype)
    remainder = torch.zeros(66, dtype=torch.int16) if dtype is torch.bfloat16 else None
    source = spread(66, seed=1).to(dtype)
    source[3] = bad
    squares = add([place(target)], [remainder], [source], threads=1)[0]
    assert not math.isfinite(squares.item())
    assert [i for i in range(66) if not math.isfinite(target[i].item())] == [3]


@PLACES
def test_opposites_cancel_to_nothing(place):
    values = spread(500).bfloat16()
    target, remainder = values.clone(), torch.zeros(500, dtype=torch.int16)
    add([place(target)], [remainder], [(values * 3).bfloat16()], threads=1)
    add([place(target)], [remainder], [(-(values * 3)).bfloat16()], threads=1)
    squares = add([place(target)], [remainder], [-values], threads=1)[0]
    lost = join(target, remainder).abs()  # no more than fp32 itself loses
    assert (lost <= 4 * values.float().abs() * 2.0**-24).all()
    assert squares.item() == pytest.approx(exact(lost), rel=1e-6)


def test_on_the_host_squares_of_a_sum_are_those_of_the_tensor_it_came_to():
    """The same bits: clipping may use either."""
    for dtype in (torch.float32, torch.bfloat16):
        target = spread(70_000).to(dtype)
        remainder = torch.zeros(70_000, dtype=torch.int16) if dtype is torch.bfloat16 else None
        squares = add([target], [remainder], [spread(70_000, seed=1).to(dtype)], threads=2)[0]
        total = target if remainder is None else join(target, remainder)
        assert squares.item() == native.squared_norms([total], threads=1)[0]
