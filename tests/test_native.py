"""The host kernels, element by element, against float64 and against torch.optim.AdamW."""

import math
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stronghold import native
from stronghold.native import Segment

ISAS = native.available_isas()
CHUNK = 64 * 1024  # csrc/adamw.cpp cuts here


def segment(
    n: int, *, seed: int = 0, grad_dtype=torch.float32, low: bool = False, step: int = 3, **settings
) -> Segment:
    """Returns a segment of a run under way, its values of many magnitudes with zeros among them."""
    generator = torch.Generator().manual_seed(seed)

    def spread(scale: float) -> Tensor:
        values = torch.randn(n, generator=generator) * scale
        values *= 10 ** (torch.rand(n, generator=generator) * 8 - 6)
        values[torch.rand(n, generator=generator) < 0.02] = 0.0
        return values

    chosen = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1} | settings
    return Segment(
        weight=spread(1.0),
        grad=spread(0.1).to(grad_dtype),
        exp_avg=spread(0.05),
        exp_avg_sq=spread(0.01).square(),
        low=torch.empty(n, dtype=torch.bfloat16) if low else None,
        step=step,
        **chosen,
    )


def copy_of(s: Segment) -> Segment:
    return replace(
        s,
        weight=s.weight.clone(),
        exp_avg=s.exp_avg.clone(),
        exp_avg_sq=s.exp_avg_sq.clone(),
        low=None if s.low is None else s.low.clone(),
    )


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.dtype is torch.bfloat16 else torch.int32)


def assert_same_bits(a: Segment, b: Segment) -> None:
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        assert torch.equal(bits(getattr(a, name)), bits(getattr(b, name))), name
    if a.low is not None:
        assert b.low is not None
        assert torch.equal(bits(a.low), bits(b.low))


def assert_within_two_ulp(got: Tensor, exact: np.ndarray, *operands: np.ndarray) -> None:
    """Asserts ``got`` within 2 float32 ulp, of the larger operand of the last addition, of ``exact``."""
    larger = np.max([np.abs(operand) for operand in operands], axis=0).astype(np.float32)
    error = np.abs(got.double().numpy() - exact) / np.spacing(larger).astype(np.float64)
    assert error.max() <= 2.0, f"{error.max():.3f} ulp at {error.argmax()}"


def check_against_float64(before: Segment, after: Segment) -> None:
    s, t = before, before.step
    grad = (s.grad.float() * s.grad_scale).double().numpy()
    m, v = s.exp_avg.double().numpy(), s.exp_avg_sq.double().numpy()
    m_kept, m_new = s.beta1 * m, (1 - s.beta1) * grad
    v_kept, v_new = s.beta2 * v, (1 - s.beta2) * grad * grad
    denom = np.sqrt(v_kept + v_new) / math.sqrt(1 - s.beta2**t) + s.eps
    kept = s.weight.double().numpy() * (1 - s.lr * s.weight_decay)
    moved = s.lr / (1 - s.beta1**t) * (m_kept + m_new) / denom
    assert_within_two_ulp(after.exp_avg, m_kept + m_new, m_kept, m_new)
    assert_within_two_ulp(after.exp_avg_sq, v_kept + v_new, v_kept, v_new)
    assert_within_two_ulp(after.weight, kept - moved, kept, moved)


# ---- adamw: the numbers ----


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
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
    ids=lambda case: ",".join(f"{k}={v}" for k, v in case.items()) or "plain",
)
def test_one_step_is_within_two_ulp_of_float64(isa, grad_dtype, case):
    before = segment(2 * CHUNK + 37, grad_dtype=grad_dtype, **case)
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


# ---- adamw: the same bits however it is run ----


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("low", [False, True])
def test_instruction_sets_and_threads_change_no_bit(grad_dtype, low):
    lengths = [1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 0, 64]
    before = [segment(n, seed=i, grad_dtype=grad_dtype, low=low, step=i + 1) for i, n in enumerate(lengths)]
    reference = [copy_of(s) for s in before]
    native.adamw(reference, threads=1, isa="plain")
    for isa in ISAS:
        for threads in (1, 2, 5):
            mine = [copy_of(s) for s in before]
            native.adamw(mine, threads=threads, isa=isa)
            for a, b in zip(reference, mine, strict=True):
                assert_same_bits(a, b)


def test_segments_keep_their_own_settings():
    given_ = [segment(11, seed=i, lr=10.0**-i, step=i + 1, weight_decay=0.1 * i) for i in range(4)]
    together, apart = [copy_of(s) for s in given_], [copy_of(s) for s in given_]
    native.adamw(together, threads=2)
    for s in apart:
        native.adamw([s], threads=1)
    for a, b in zip(together, apart, strict=True):
        assert_same_bits(a, b)


@settings(deadline=None, max_examples=60)
@given(
    n=st.one_of(st.integers(0, 200), st.integers(CHUNK - 40, CHUNK + 40)),
    offsets=st.lists(st.integers(0, 19), min_size=5, max_size=5),
    threads=st.integers(1, 3),
    isa=st.sampled_from(ISAS),
    grad_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_length_at_any_offset_writes_its_own_elements_alone(n, offsets, threads, isa, grad_dtype):
    before = segment(n, seed=n, grad_dtype=grad_dtype, low=True)
    before.low.zero_()
    reference = copy_of(before)
    native.adamw([reference], threads=1, isa="plain")

    margin, names = 24, ("weight", "grad", "exp_avg", "exp_avg_sq", "low")
    buffers = {name: torch.full((n + 2 * margin,), 7.0).to(getattr(before, name).dtype) for name in names}
    views = {name: buffers[name][offset : offset + n] for name, offset in zip(names, offsets, strict=True)}
    for name in names:
        views[name].copy_(getattr(before, name))
    native.adamw([replace(before, **views)], threads=threads, isa=isa)
    for name, offset in zip(names, offsets, strict=True):
        assert torch.equal(bits(views[name]), bits(getattr(reference, name))), name
        around = torch.cat([buffers[name][:offset], buffers[name][offset + n :]])
        assert (around == 7.0).all(), name


# ---- adamw: grad_scale, low ----


@pytest.mark.parametrize("isa", ISAS)
def test_grad_scale_is_clipping_done_beforehand(isa):
    before = segment(5003)
    scale = 0.123456789
    scaled = replace(copy_of(before), grad=before.grad * torch.tensor(scale))  # what clip_grad_norm_ does
    mine = replace(copy_of(before), grad_scale=scale)
    native.adamw([scaled], threads=1, isa=isa)
    native.adamw([mine], threads=1, isa=isa)
    assert_same_bits(scaled, mine)


@pytest.mark.parametrize("isa", ISAS)
def test_a_bf16_gradient_is_its_float32_value(isa):
    narrow = segment(5003, grad_dtype=torch.bfloat16)
    wide = replace(copy_of(narrow), grad=narrow.grad.float())
    narrow = copy_of(narrow)
    native.adamw([narrow], threads=1, isa=isa)
    native.adamw([wide], threads=1, isa=isa)
    assert_same_bits(narrow, wide)


@pytest.mark.parametrize("isa", ISAS)
def test_low_is_the_new_weight_in_bf16(isa):
    s = segment(70_001, low=True)
    native.adamw([s], threads=1, isa=isa)
    assert torch.equal(bits(s.low), bits(s.weight.to(torch.bfloat16)))


@pytest.mark.parametrize("isa", ISAS)
def test_low_rounds_every_bf16_neighbourhood_as_torch_does(isa):
    # Every upper half with the lower halves around a tie: normals, subnormals, both zeros, infinities, NaNs.
    upper = torch.arange(0x10000, dtype=torch.int64) << 16
    patterns = torch.cat([upper + lower for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    patterns = torch.where(patterns >= 2**31, patterns - 2**32, patterns).to(torch.int32)
    weight = patterns.view(torch.float32)
    n = weight.numel()
    s = Segment(
        weight=weight.clone(),
        grad=torch.zeros(n),
        exp_avg=torch.zeros(n),
        exp_avg_sq=torch.zeros(n),
        low=torch.empty(n, dtype=torch.bfloat16),
        lr=0.0,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.1,
        step=1,
    )
    native.adamw([s], threads=2, isa=isa)
    numbers = ~weight.isnan()
    assert torch.equal(bits(s.weight)[numbers], bits(weight)[numbers])  # a rate of zero moves nothing
    assert torch.equal(bits(s.low)[numbers], bits(weight.to(torch.bfloat16))[numbers])
    assert s.low[~numbers].isnan().all()


# ---- squared_norm ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isa", ISAS)
def test_squared_norm_is_the_float64_sum(isa, dtype):
    tensors = [segment(n, seed=n).grad.to(dtype) for n in (1, 15, 16, 17, CHUNK, 2 * CHUNK + 9, 0)]
    exact = math.fsum(float(x) ** 2 for t in tensors for x in t.double().tolist())
    assert native.squared_norm(tensors, threads=2, isa=isa) == pytest.approx(exact, rel=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squared_norm_is_the_same_bits_for_every_isa_and_thread_count(dtype):
    tensors = [segment(n, seed=n).grad.to(dtype) for n in (3 * CHUNK + 5, 31, CHUNK - 1, 5 * CHUNK)]
    results = {native.squared_norm(tensors, threads=threads, isa=isa) for isa in ISAS for threads in (1, 2, 3, 7)}
    assert len(results) == 1


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 5, CHUNK - 1, CHUNK, 2 * CHUNK + 2])
def test_squared_norm_shows_what_is_not_finite_and_only_that(isa, dtype, place):
    tensor = torch.full((2 * CHUNK + 3,), 3e38).to(dtype)  # the largest squares float32 could not hold
    assert math.isfinite(native.squared_norm([tensor], threads=2, isa=isa))
    tensor[place] = -math.inf
    assert native.squared_norm([tensor], threads=2, isa=isa) == math.inf
    tensor[place] = math.nan
    assert math.isnan(native.squared_norm([tensor], threads=2, isa=isa))


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=70),
    offset=st.integers(0, 17),
    isa=st.sampled_from(ISAS),
)
def test_squared_norm_of_any_values_at_any_offset(values, offset, isa):
    tensor = torch.tensor([math.nan] * offset + values + [math.nan], dtype=torch.float32)[offset:-1]
    exact = math.fsum(value * value for value in values)
    assert native.squared_norm([tensor], threads=1, isa=isa) == pytest.approx(exact, rel=1e-14, abs=1e-320)


def test_squared_norm_of_nothing_is_zero():
    assert native.squared_norm([], threads=1) == 0.0


# ---- what is refused ----


def other(n: int, **options) -> Tensor:
    return torch.zeros(n, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"weight": other(8, dtype=torch.float64)},
            r"segment 1: weight must be torch\.float32 \(got torch\.float64\)",
        ),
        ({"weight": other(8, dtype=torch.bfloat16)}, "weight must be torch.float32"),
        (
            {"grad": other(8, dtype=torch.float16)},
            r"grad must be torch\.float32 or torch\.bfloat16 \(got torch\.float16",
        ),
        ({"exp_avg": other(8, dtype=torch.bfloat16)}, "exp_avg must be torch.float32"),
        ({"exp_avg_sq": other(8, dtype=torch.float64)}, "exp_avg_sq must be torch.float32"),
        ({"low": other(8, dtype=torch.float16)}, "low must be torch.bfloat16"),
        ({"weight": other(8, device="meta")}, r"weight must be on the CPU \(got meta\)"),
        ({"grad": other(8, device="meta")}, "grad must be on the CPU"),
        ({"exp_avg": other(8, device="meta")}, "exp_avg must be on the CPU"),
        ({"exp_avg_sq": other(8, device="meta")}, "exp_avg_sq must be on the CPU"),
        ({"low": other(8, device="meta", dtype=torch.bfloat16)}, "low must be on the CPU"),
        ({"weight": other(16)[::2]}, r"weight must be contiguous \(got shape \(8,\) with strides \(2,\)\)"),
        ({"grad": other(16)[::2]}, "grad must be contiguous"),
        ({"exp_avg": other(16)[::2]}, "exp_avg must be contiguous"),
        ({"exp_avg_sq": other(16)[::2]}, "exp_avg_sq must be contiguous"),
        ({"low": other(16, dtype=torch.bfloat16)[::2]}, "low must be contiguous"),
        ({"grad": other(7)}, r"same number of elements \(got weight 8, grad 7, exp_avg 8, exp_avg_sq 8\)"),
        ({"exp_avg": other(9)}, "same number of elements"),
        ({"exp_avg_sq": other(0)}, "same number of elements"),
        ({"low": other(7, dtype=torch.bfloat16)}, "same number of elements"),
        ({"step": 0}, r"step counts from 1 \(got 0\)"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_segment_that_breaks_a_rule_is_refused_before_anything_is_written(change, message):
    good, bad = segment(8, seed=1), replace(segment(8), **change)
    untouched = copy_of(good)
    with pytest.raises(ValueError, match=message):
        native.adamw([good, bad], threads=1)
    assert_same_bits(good, untouched)


def test_the_message_names_the_segment():
    bad = replace(segment(8), grad=torch.zeros(8, dtype=torch.float16))
    with pytest.raises(ValueError, match="segment 1: grad must"):
        native.adamw([segment(8), bad], threads=1)


@pytest.mark.parametrize("change", ["weight", "exp_avg"])
def test_overlapping_buffers_are_refused(change):
    first = segment(8)
    second = replace(segment(8), **{change: getattr(first, change)})
    untouched = copy_of(first)
    with pytest.raises(ValueError, match="must not overlap"):
        native.adamw([first, second], threads=2)
    assert_same_bits(first, untouched)


def test_a_gradient_that_is_the_weight_is_refused():
    s = segment(8)
    with pytest.raises(ValueError, match=r"must not overlap \(two of segments 0 and 0 do\)"):
        native.adamw([replace(s, grad=s.weight)], threads=1)


@pytest.mark.parametrize("threads", [0, -1, 1.5, None])
def test_threads_must_be_positive(threads):
    with pytest.raises(ValueError, match="threads must be an integer of 1 or more"):
        native.adamw([segment(8)], threads=threads)
    with pytest.raises(ValueError, match="threads must be an integer of 1 or more"):
        native.squared_norm([torch.zeros(8)], threads=threads)


def test_an_unknown_isa_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"isa must be one .* \(got 'avx1024', it runs plain"):
        native.adamw([segment(8)], threads=1, isa="avx1024")
    with pytest.raises(ValueError, match="isa must be one"):
        native.squared_norm([torch.zeros(8)], threads=1, isa="")


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (
            other(4, dtype=torch.float64),
            r"tensor 1 must be torch\.float32 or torch\.bfloat16 \(got torch\.float64\)",
        ),
        (other(4, device="meta"), r"tensor 1 must be on the CPU \(got meta\)"),
        (other(8)[::2], "tensor 1 must be contiguous"),
    ],
    ids=["dtype", "device", "strides"],
)
def test_squared_norm_refuses_what_it_cannot_read(tensor, message):
    with pytest.raises(ValueError, match=message):
        native.squared_norm([torch.zeros(3), tensor], threads=1)


def test_a_missing_extension_says_how_to_build_it():
    code = "import sys; sys.modules['stronghold._C'] = None; import stronghold.native"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode != 0
    assert "build them with `pip install .`" in done.stderr
    assert "direct cause of the following exception" in done.stderr


# ---- running beside Python ----


def test_the_interpreter_runs_while_a_kernel_does():
    s = segment(1)
    n = 20_000_000
    s = replace(s, weight=torch.zeros(n), grad=torch.zeros(n), exp_avg=torch.zeros(n), exp_avg_sq=torch.zeros(n))
    span = []

    def work() -> None:
        begin = time.perf_counter()
        native.adamw([s], threads=1, isa="plain")
        span.extend([begin, time.perf_counter()])

    worker = threading.Thread(target=work)
    ticks = []
    worker.start()
    while worker.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.001)
    begin, end = span
    inside = [tick for tick in ticks if begin <= tick <= end]
    # With the lock held, Python could tick at the call's two edges at most.
    gaps = [b - a for a, b in zip([begin, *inside], [*inside, end], strict=True)]
    assert max(gaps) < (end - begin) / 2


# ---- the processor ----


def test_isas_are_listed_plainest_first_and_the_last_is_the_best():
    assert ISAS[0] == "plain"
    assert set(ISAS) <= {"plain", "avx2", "avx512"}
    assert native.best_isa() == ISAS[-1]


def test_usable_cores_is_within_the_affinity():
    assert 1 <= native.usable_cores() <= len(os.sched_getaffinity(0))


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_cgroup_v2_quota_is_the_least_of_the_group_and_those_above_it(tmp_path):
    write(tmp_path / "memberships", "0::/user/job\n")
    root = tmp_path / "cgroup"
    assert native._cgroup_quota(tmp_path / "memberships", root) == math.inf
    write(root / "cpu.max", "max 100000\n")
    write(root / "user/cpu.max", "250000 100000\n")
    write(root / "user/job/cpu.max", "400000 100000\n")
    assert native._cgroup_quota(tmp_path / "memberships", root) == 2.5
    write(root / "user/job/cpu.max", "50000 100000\n")
    assert native._cgroup_quota(tmp_path / "memberships", root) == 0.5


def test_a_cgroup_v1_quota_is_read_from_the_cpu_controller(tmp_path):
    write(tmp_path / "memberships", "5:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n")
    root = tmp_path / "cgroup"
    write(root / "cpu/cpu.cfs_quota_us", "-1\n")
    write(root / "cpu/cpu.cfs_period_us", "100000\n")
    assert native._cgroup_quota(tmp_path / "memberships", root) == math.inf
    write(root / "cpu/docker/a/cpu.cfs_quota_us", "300000\n")
    write(root / "cpu/docker/a/cpu.cfs_period_us", "100000\n")
    assert native._cgroup_quota(tmp_path / "memberships", root) == 3.0


def test_a_cgroup_that_cannot_be_read_sets_no_limit(tmp_path):
    assert native._cgroup_quota(tmp_path / "absent", tmp_path) == math.inf
    write(tmp_path / "memberships", "0::/\n")
    write(tmp_path / "cpu.max", "nonsense")
    assert native._cgroup_quota(tmp_path / "memberships", tmp_path) == math.inf
