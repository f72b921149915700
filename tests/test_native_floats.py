"""The update with float32 moments, element by element, against float64 and against torch.optim.AdamW."""

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
from tests.native_cases import CHUNK, ISAS, assert_same_bits, bits, buffers, copy_of, segment, split, with_buffers


def assert_within_two_ulp(got: Tensor, exact: np.ndarray, *operands: np.ndarray) -> None:
    """Asserts ``got`` within 2 float32 ulp, of the larger operand of the last addition, of ``exact``."""
    larger = np.max([np.abs(operand) for operand in operands], axis=0).astype(np.float32)
    error = np.abs(got.double().numpy() - exact) / np.spacing(larger).astype(np.float64)
    assert error.max() <= 2.0, f"{error.max():.3f} ulp at {error.argmax()}"


def check_against_float64(before: Segment, after: Segment) -> None:
    s, t = before, before.step
    grad = s.grad.double().numpy() * s.grad_scale
    m, v = s.exp_avg.double().numpy(), s.exp_avg_sq.double().numpy()
    m_kept, m_new = s.beta1 * m, (1 - s.beta1) * grad
    v_kept, v_new = s.beta2 * v, (1 - s.beta2) * grad * grad
    denom = np.sqrt(v_kept + v_new) / math.sqrt(1 - s.beta2**t) + s.eps
    kept = s.weight.double().numpy() * (1 - s.lr * s.weight_decay)
    moved = s.lr / (1 - s.beta1**t) * (m_kept + m_new) / denom
    assert_within_two_ulp(after.exp_avg, m_kept + m_new, m_kept, m_new)
    assert_within_two_ulp(after.exp_avg_sq, v_kept + v_new, v_kept, v_new)
    assert_within_two_ulp(after.weight, kept - moved, kept, moved)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("grad", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"step": 1},
        {"step": 100_000},
        {"weight_decay": 0.0},
        {"grad_scale": 0.37},
        {"lr": 0.3, "weight_decay": 0.5, "beta1": 0.5, "beta2": 0.95},
        {"beta1": 0.0},
        {"eps": 1e-3},
        {"lr": 0.0},
    ],
    ids=lambda case: ",".join(f"{k}={v}" for k, v in case.items()) or "usual",
)
def test_one_step_is_within_two_ulp_of_float64(isa, grad, case):
    before = segment(2 * CHUNK + 37, grad=grad, **case)
    after = copy_of(before)
    native.adamw([after], threads=2, isa=isa)
    check_against_float64(before, after)


@pytest.mark.parametrize("isa", ISAS)
def test_a_fresh_weight_of_zero_is_within_two_ulp_of_float64(isa):
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
def test_a_step_is_within_two_ulp_where_rounding_shows(isa, settings):
    before = where_rounding_shows(100_000, **settings)
    after = copy_of(before)
    native.adamw([after], threads=2, isa=isa)
    check_against_float64(before, after)


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "plain"])
@pytest.mark.parametrize("eps", [1e-8, 1e-42, 1e-43, 0.0])
@pytest.mark.parametrize("split_weight,grad", [(False, "float32"), (True, "bfloat16"), (True, "split")])
def test_instruction_sets_give_the_same_bits_of_a_million_updates(isa, eps, split_weight, grad):
    """So many that some come to either side of a rounding from either end of an approximated root's error."""
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
