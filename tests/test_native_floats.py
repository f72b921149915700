"""The update with float32 moments, element by element, against float64 and against torch.optim.AdamW."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stronghold import native
from stronghold.native import Segment
from tests.crossed import crossed
from tests.native_cases import (
    CHUNK,
    ISAS,
    SETTINGS,
    assert_same_bits,
    bits,
    buffers,
    copy_of,
    segment,
    split,
    with_buffers,
)
from tests.native_reference import adamw_floats

U = 2.0**-24  # the relative error of one rounding
SMALLEST = 2.0**-149


def ulp(values: np.ndarray) -> np.ndarray:
    return np.spacing(np.abs(values).astype(np.float32)).astype(np.float64)


def assert_within(bound: np.ndarray, got: Tensor, exact: np.ndarray, name: str) -> None:
    excess = np.abs(got.double().numpy() - exact) - bound * (1 + 1e-6)  # products of two errors
    if len(excess) == 0:
        return
    at = int(np.nan_to_num(excess, nan=np.inf).argmax())
    assert excess[at] <= 0, f"{name}[{at}] = {got[at]}, {excess[at] / ulp(exact)[at]:.3f} ulp too far from {exact[at]}"


def check_against_float64(before: Segment, after: Segment) -> None:
    """Asserts what ``csrc/adamw.h`` derives. What underflows may be off by as much as the smallest float, too."""
    s, t = before, before.step
    grad = s.grad.double().numpy() * s.grad_scale
    m, v = s.exp_avg.double().numpy(), s.exp_avg_sq.double().numpy()
    m_kept, m_new = s.beta1 * m, (1 - s.beta1) * grad
    v_kept, v_new = s.beta2 * v, (1 - s.beta2) * grad * grad
    m, v = m_kept + m_new, v_kept + v_new
    largest = np.maximum(np.abs(m_kept), np.abs(m_new))
    assert_within(1.5 * ulp(largest) + SMALLEST, after.exp_avg, m, "exp_avg")
    assert_within(1.5 * ulp(v) + SMALLEST, after.exp_avg_sq, v, "exp_avg_sq")

    correction = math.sqrt(1 - s.beta2**t)
    rate = s.lr / (1 - s.beta1**t)
    denom = np.maximum(np.sqrt(v) / correction + s.eps, SMALLEST)
    kept, moved = s.weight.double().numpy() * (1 - s.lr * s.weight_decay), rate * m / denom
    largest = rate * np.maximum(largest, np.abs(m)) / denom  # had the terms of m not cancelled
    lost = np.sqrt(v + 2 * SMALLEST) - np.sqrt(np.maximum(v - 2 * SMALLEST, 0)) + SMALLEST
    underflow = (rate * 2 * SMALLEST + largest * lost / correction) / denom + rate * correction * SMALLEST
    exact, divided = kept - moved, (v > 2 * SMALLEST) | (s.eps > 0)  # elsewhere v may be 0 in fp32, torch's too
    for name, bound in (
        ("weight", 0.5 * ulp(exact) + 0.5 * ulp(moved) + 6 * U * largest),
        ("weight, by its ulp", 2 * ulp(np.maximum(np.abs(kept), 8 * largest))),
    ):
        assert_within((bound + underflow)[divided], after.weight[torch.from_numpy(divided)], exact[divided], name)


def reference(before: Segment) -> Segment:
    """Returns what a step makes of float32 tensors, by numpy."""
    s = before
    new = adamw_floats(
        *(tensor.numpy() for tensor in (s.weight, s.exp_avg, s.exp_avg_sq, s.grad.float())),
        lr=s.lr,
        beta1=s.beta1,
        beta2=s.beta2,
        eps=s.eps,
        weight_decay=s.weight_decay,
        step=s.step,
        grad_scale=s.grad_scale,
    )
    return replace(s, **dict(zip(("weight", "exp_avg", "exp_avg_sq"), map(torch.from_numpy, new), strict=True)))


CASES = {
    "usual": {},
    "first": {"step": 1},
    "late": {"step": 100_000},
    "no decay": {"weight_decay": 0.0},
    "clipped": {"grad_scale": 0.37},
    "large": {"lr": 0.3, "weight_decay": 0.5, "beta1": 0.5, "beta2": 0.95},
    "no first moment": {"beta1": 0.0},
    "large eps": {"eps": 1e-3},
    "no rate": {"lr": 0.0},
}


@pytest.mark.parametrize(("isa", "grad", "case"), crossed(ISAS, ["float32", "bfloat16"], CASES, together=1))
def test_one_step_is_float64s_within_its_bounds(isa, grad, case):
    before = segment(2 * CHUNK + 37, grad=grad, **CASES[case])
    after = copy_of(before)
    native.adamw([after], threads=2, isa=isa)
    check_against_float64(before, after)
    assert_same_bits(after, reference(before))


@pytest.mark.parametrize("isa", ISAS)
def test_a_fresh_weight_of_zero_is_float64s_within_its_bounds(isa):
    # The weight is the update then: nothing larger hides the update's own rounding.
    before = segment(10_001, step=1)
    for tensor in (before.weight, before.exp_avg, before.exp_avg_sq):
        tensor.zero_()
    after = copy_of(before)
    native.adamw([after], threads=1, isa=isa)
    check_against_float64(before, after)


def where_rounding_shows(n: int, **settings) -> Segment:
    """Returns a segment whose sums cancel, whose weights are near their updates, or whose numbers are extreme."""
    before = segment(n, seed=3, **settings)
    generator = torch.Generator().manual_seed(4)
    kind = torch.arange(n) % 5
    cancelling = before.grad.double() * before.grad_scale * (before.beta1 - 1) / before.beta1
    cancelling *= 1 + 1e-5 * torch.randn(n, generator=generator, dtype=torch.float64)
    before.exp_avg.copy_(torch.where(kind == 0, cancelling.float(), before.exp_avg))
    for chosen, scale in ((1, 1e-25), (2, 1e12)):
        before.exp_avg.mul_(torch.where(kind == chosen, scale, 1.0))
        before.exp_avg_sq.mul_(torch.where(kind == chosen, scale**1.5, 1.0))
        before.grad.mul_(torch.where(kind == chosen, scale, 1.0))
    grad = before.grad.double() * before.grad_scale
    exp_avg = before.beta1 * before.exp_avg.double() + (1 - before.beta1) * grad
    exp_avg_sq = before.beta2 * before.exp_avg_sq.double() + (1 - before.beta2) * grad * grad
    denom = exp_avg_sq.sqrt() / math.sqrt(1 - before.beta2**before.step) + before.eps
    moved = before.lr / (1 - before.beta1**before.step) * exp_avg / denom
    # From a sixteenth of the update to 32 times it, in its direction and against it.
    near = moved * torch.exp2(torch.rand(n, generator=generator) * 9 - 4) * (kind - 3.5).sign()
    before.weight.copy_(torch.where(kind >= 3, near.float(), before.weight))
    return before


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"step": 1},
        {"step": 100_000, "eps": 1e-20},
        {"lr": 0.3, "weight_decay": 0.5, "beta1": 0.5, "beta2": 0.95},
        {"beta1": 0.85, "weight_decay": 0.0, "grad_scale": 0.37},
    ],
    ids=lambda settings: ",".join(f"{k}={v}" for k, v in settings.items()) or "usual",
)
def test_a_step_is_float64s_within_its_bounds_where_rounding_shows(isa, settings):
    before = where_rounding_shows(100_000, **settings)
    after = copy_of(before)
    native.adamw([after], threads=2, isa=isa)
    check_against_float64(before, after)
    assert_same_bits(after, reference(before))


EXTREMES = {
    "lr": (1e-8, 1e-3, 1.0),
    "beta1": (0.0, 0.9, 0.9999),
    "beta2": (0.0, 0.95, 0.9999),
    "eps": (0.0, 1e-8, 1e-3),
    "weight_decay": (0.0, 0.1),
    "step": (1, 10**6),
    "grad_scale": (1.0, 0.37, 1e-10, 3e9),
}


@pytest.mark.parametrize(("weight", "grad"), crossed([1e-30, 1.0, 1e30], [1e-30, 1e-12, 1.0, 1e6], together=1))
@pytest.mark.parametrize("isa", ISAS[-1:])
def test_extreme_numbers_and_settings_stay_within_the_bounds(isa, grad, weight):
    """One choice in seven of the settings' combinations, the same ones each time."""
    combinations = list(itertools.product(*EXTREMES.values()))
    for number, values in enumerate(combinations[::7]):
        before = segment(256, seed=number, **dict(zip(EXTREMES, values, strict=True)))
        before.weight.mul_(weight)
        before.grad.mul_(grad)
        before.exp_avg.mul_(grad * before.grad_scale)
        before.exp_avg_sq.mul_((grad * before.grad_scale) ** 2)
        if before.eps == 0.0:  # where the root underflows, what it divides is infinite, in torch too
            before.exp_avg_sq.clamp_(min=1e-36)
        after = copy_of(before)
        native.adamw([after], threads=1, isa=isa)
        assert_same_bits(after, reference(before))
        check_against_float64(before, after)


@pytest.mark.parametrize("isa", ISAS)
def test_infinities_and_nan_are_where_torch_has_them(isa):
    special = torch.tensor([0.0, 1.0, -2.0, torch.inf, -torch.inf, torch.nan, 3e38, 1e-45])
    # Of an infinite first moment torch makes NaN, by adding a part of its difference from the gradient; and it
    # multiplies by the step's size before it divides, which matters where that overflows or underflows.
    numbers = torch.tensor([0.0, 1.0, -2.0, 1e-30, torch.nan])
    grid = torch.cartesian_prod(special, special, numbers, special[special.ge(0) | special.isnan()])
    weight, grad, exp_avg, exp_avg_sq = (column.clone() for column in grid.unbind(1))
    for weight_decay, eps in ((0.0, 1e-8), (0.1, 1e-8), (0.1, 0.0)):
        before = replace(
            segment(len(grid), step=5, weight_decay=weight_decay, eps=eps),
            weight=weight,
            grad=grad,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
        )
        mine, theirs = copy_of(before), copy_of(before)
        native.adamw([mine], threads=1, isa=isa)
        torch_step(theirs)
        for name in ("weight", "exp_avg", "exp_avg_sq"):
            one, other = getattr(mine, name), getattr(theirs, name)
            same = (one.isnan() == other.isnan()) & (one.isinf() == other.isinf())
            same &= one.isfinite() | other.isnan() | (one == other)
            assert same.all(), (name, grid[~same][:3], one[~same][:3], other[~same][:3])


def torch_step(s: Segment) -> None:
    """Takes a step of torch's fused AdamW."""
    torch._fused_adamw_(
        [s.weight],
        [s.grad],
        [s.exp_avg],
        [s.exp_avg_sq],
        [],
        [torch.tensor(float(s.step))],
        lr=s.lr,
        beta1=s.beta1,
        beta2=s.beta2,
        weight_decay=s.weight_decay,
        eps=s.eps,
        amsgrad=False,
        maximize=False,
    )


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "plain"])
@pytest.mark.parametrize(
    ("eps", "formats"),
    crossed([1e-8, 1e-42, 1e-43, 0.0], [(False, "float32"), (True, "bfloat16"), (True, "split")], together=1),
)
def test_instruction_sets_give_the_same_bits_of_a_million_updates(isa, eps, formats):
    """So many that some come to either side of a rounding from either end of an approximated root's error."""
    split_weight, grad = formats
    before = where_rounding_shows(2**20, eps=eps)
    before.weight[::2] = 0  # the update alone is rounded
    for place, value in enumerate((0.0, 1e-45, torch.inf, torch.nan, -1.0, 1e38)):
        before.exp_avg_sq[2**18 + place :: 2**16] = value
        before.grad[2**18 + place :: 2**17] = 0.0
    if split_weight:
        weight, remainder = split(before.weight)
        before = replace(before, weight=weight, remainder=remainder)
    if grad == "bfloat16":
        before = replace(before, grad=before.grad.bfloat16())
    elif grad == "split":
        values, remainder = split(before.grad)
        before = replace(before, grad=values, grad_remainder=remainder)
    plain, after = copy_of(before), copy_of(before)
    native.adamw([plain], threads=2, isa="plain")
    native.adamw([after], threads=2, isa=isa)
    assert_same_bits(after, plain)


@pytest.mark.parametrize("isa", ISAS)
def test_a_square_beyond_float32_does_not_lose_the_step(isa):
    before = segment(33, beta2=0.999)
    before.grad.fill_(3e19)  # its square is beyond float32, a thousandth of that is not
    after = copy_of(before)
    native.adamw([after], threads=1, isa=isa)
    check_against_float64(before, after)


@pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"weight_decay": 0.0, "betas": (0.8, 0.95)}])
@pytest.mark.parametrize("isa", ISAS)
def test_many_steps_follow_torch(isa, options):
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(4099, generator=generator)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, foreach=False, **options)
    group = optimizer.param_groups[0]
    weight, exp_avg, exp_avg_sq = start.clone(), torch.zeros(4099), torch.zeros(4099)
    for step in range(1, 26):
        grad = torch.randn(4099, generator=generator) * 0.1 + 0.02
        group["lr"] = 1e-2 * step / 25
        parameter.grad = grad.clone()
        optimizer.step()
        mine = Segment(
            weight=weight,
            grad=grad,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
        )
        native.adamw([mine], threads=2, isa=isa)
    state = optimizer.state[parameter]
    torch.testing.assert_close(weight, parameter.detach(), rtol=1e-6, atol=3e-7)
    torch.testing.assert_close(exp_avg, state["exp_avg"], rtol=1e-6, atol=3e-8)
    torch.testing.assert_close(exp_avg_sq, state["exp_avg_sq"], rtol=3e-6, atol=1e-12)


@pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"weight_decay": 0.0, "beta1": 0.8, "beta2": 0.9999}])
def test_a_thousand_steps_stay_as_near_float64_as_torchs_fp32(options):
    """The mean error after 1,000 steps is at most that of torch's fused AdamW, the largest at most 1.5 times its."""
    n, steps = 4099, 1000
    generator = torch.Generator().manual_seed(1)
    start = {"weight": torch.randn(n, generator=generator)} | {
        name: torch.zeros(n) for name in ("exp_avg", "exp_avg_sq")
    }
    ours, theirs, exact = (
        {name: tensor.to(dtype, copy=True) for name, tensor in start.items()}
        for dtype in (torch.float32, torch.float32, torch.float64)
    )
    mean = torch.randn(n, generator=generator) * 0.02
    for step in range(1, steps + 1):
        grad = torch.randn(n, generator=generator) * 0.1 + mean
        lr = 1e-3 * min(1.0, step / 100)
        native.adamw([Segment(**ours, grad=grad, step=step, **SETTINGS | {"lr": lr} | options)], threads=1)
        for one in (theirs, exact):
            given_ = grad.to(one["weight"].dtype)
            torch_step(Segment(**one, grad=given_, step=step, **SETTINGS | {"lr": lr} | options))
    for name, tensor in exact.items():
        mine, torchs = ((one[name] - tensor).abs() for one in (ours, theirs))
        assert mine.mean() <= torchs.mean() and mine.max() <= 1.5 * torchs.max(), (name, mine.max(), torchs.max())
        assert torchs.max() > 0


def test_segments_keep_their_own_settings():
    given_ = [segment(11, seed=i, lr=10.0**-i, step=i + 1, weight_decay=0.1 * i) for i in range(4)]
    together, apart = [copy_of(s) for s in given_], [copy_of(s) for s in given_]
    native.adamw(together, threads=2)
    for s in apart:
        native.adamw([s], threads=1)
    for a, b in zip(together, apart, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("blocks,scale", [(False, 2.0**-12), (True, 0.123456789)])  # between floats without rounding
@pytest.mark.parametrize("isa", ISAS)
def test_grad_scale_is_clipping_done_beforehand(isa, blocks, scale):
    before = segment(5003, blocks=blocks)
    scaled = replace(copy_of(before), grad=before.grad * torch.tensor(scale))  # what clip_grad_norm_ does
    mine = replace(copy_of(before), grad_scale=scale)
    native.adamw([scaled], threads=1, isa=isa)
    native.adamw([mine], threads=1, isa=isa)
    assert_same_bits(replace(scaled, grad=mine.grad), mine)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("isa", ISAS)
def test_a_bf16_gradient_is_its_float32_value(isa, blocks):
    narrow = segment(5003, grad="bfloat16", blocks=blocks)
    wide = replace(copy_of(narrow), grad=narrow.grad.float())
    narrow = copy_of(narrow)
    native.adamw([narrow], threads=1, isa=isa)
    native.adamw([wide], threads=1, isa=isa)
    assert_same_bits(replace(narrow, grad=wide.grad), wide)


@settings(max_examples=60)
@given(
    n=st.one_of(st.integers(0, 200), st.integers(CHUNK - 40, CHUNK + 40)),
    offsets=st.lists(st.integers(0, 19), min_size=8, max_size=8),
    threads=st.integers(1, 3),
    isa=st.sampled_from(ISAS),
    grad=st.sampled_from(["float32", "bfloat16", "split"]),
    split_weight=st.booleans(),
    blocks=st.booleans(),
)
def test_any_length_at_any_offset_writes_its_own_elements_alone(n, offsets, threads, isa, grad, split_weight, blocks):
    before = segment(n, seed=n, grad=grad, split_weight=split_weight, blocks=blocks)
    reference = copy_of(before)
    native.adamw([reference], threads=1, isa="plain")

    margin, views, outer = 24, {}, {}
    for (name, tensor), offset in zip(buffers(before).items(), offsets, strict=False):
        outer[name] = torch.full((tensor.numel() + 2 * margin,), 7.0).to(tensor.dtype)
        views[name] = outer[name][offset : offset + tensor.numel()]
        views[name].copy_(tensor)
    native.adamw([with_buffers(before, views)], threads=threads, isa=isa)
    for (name, expected), offset in zip(buffers(reference).items(), offsets, strict=False):
        assert torch.equal(bits(views[name]), bits(expected)), name
        around = torch.cat([outer[name][:offset], outer[name][offset + expected.numel() :]])
        assert (around == 7).all(), name
