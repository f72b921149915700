"""What the kernels' wrappers refuse: every case, its message, and that nothing was written."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stronghold import native
from stronghold.native import Addition, Blocks
from tests.native_cases import assert_same_bits, buffers, copy_of, segment, with_buffers


def zeros(n: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(n, dtype=dtype, device=device)


def strided(n: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(2 * n, dtype=dtype)[::2]


def full(n: int = 8):
    """Returns a segment that has every buffer there is."""
    return segment(n, grad="split", split_weight=True, blocks=True)


RIGHT = {name: tensor.dtype for name, tensor in buffers(full()).items()}
WRONG = {torch.bfloat16: torch.float16, torch.int16: torch.bfloat16, torch.uint8: torch.int8}
ALLOWED = {
    torch.bfloat16: r"torch\.float32 or torch\.bfloat16",
    torch.int16: r"torch\.int16",
    torch.uint8: r"torch\.uint8",
}


def refused(bad, message: str) -> None:
    """Asserts that a call with ``bad`` behind a good segment is refused and writes nothing."""
    good = segment(8, seed=1)
    untouched = copy_of(good)
    with pytest.raises(ValueError, match=message):
        native.adamw([good, bad], threads=2)
    assert_same_bits(good, untouched)


@pytest.mark.parametrize("name", RIGHT)
def test_every_buffer_of_a_segment_is_checked(name):
    dtype, n = RIGHT[name], 1 if name.endswith("exponents") else 8
    cases = {
        f"segment 1: {name} must be {ALLOWED[dtype]} .got {WRONG[dtype]}.": zeros(n, WRONG[dtype]),
        f"segment 1: {name} must be on the CPU .got meta.": zeros(n, dtype, "meta"),
    }
    if name != "weight":  # the others are measured against it
        cases[f"segment 1: {name} must hold {n} elements .got {n + 1}."] = zeros(n + 1, dtype)
        cases[f"segment 1: {name} must hold {n} elements .got 0."] = zeros(0, dtype)
    if n > 1:
        cases[rf"segment 1: {name} must be contiguous .got shape .8,. with strides .2,.."] = strided(8, dtype)
    for message, tensor in cases.items():
        refused(with_buffers(full(), {name: tensor}), message)


@pytest.mark.parametrize("name", ["weight", "grad", "exp_avg", "exp_avg_sq"])
def test_the_float32_buffers_are_checked_too(name):
    for tensor, message in (
        (zeros(8, torch.float64), f"segment 1: {name} must be torch.float32.*got torch.float64"),
        (strided(8, torch.float32), f"segment 1: {name} must be contiguous"),
        (zeros(8, device="meta"), f"segment 1: {name} must be on the CPU"),
        (zeros(9), "must hold . elements"),
    ):
        refused(replace(segment(8), **{name: tensor}), message)


@pytest.mark.parametrize(("n", "exponents"), [(1, 2), (64, 2), (65, 1), (128, 3)])
def test_one_exponent_per_block(n, exponents):
    bad = segment(n, blocks=True)
    expected = -(-n // 64)
    for name in ("exp_avg", "exp_avg_sq"):
        wrong = Blocks(codes=getattr(bad, name).codes, exponents=zeros(exponents, torch.uint8))
        message = f"segment 1: {name}.exponents must hold {expected} elements .got {exponents}."
        refused(replace(bad, **{name: wrong}), message)


def test_halves_come_in_twos():
    halves, whole = segment(8, split_weight=True), segment(8)
    refused(replace(halves, remainder=None), "weight is bfloat16 and needs a remainder")
    refused(
        replace(whole, remainder=halves.remainder), "remainder is the low half of a bfloat16 weight .got a weight of"
    )
    message = "grad_remainder is the low half of a bfloat16 grad .got a grad of torch.float32.; leave it out"
    refused(replace(whole, grad_remainder=zeros(8, torch.int16)), message)


def test_moments_are_of_one_kind():
    fp32, eight = segment(8), segment(8, blocks=True)
    message = "exp_avg and exp_avg_sq must be of one kind .got Tensor and Blocks."
    refused(replace(fp32, exp_avg_sq=eight.exp_avg_sq), message)
    refused(replace(fp32, exp_avg=eight.exp_avg), "one kind .got Blocks and Tensor.")


def test_steps_count_from_one():
    refused(replace(segment(8), step=0), r"segment 1: step counts from 1 \(got 0\)")


@pytest.mark.parametrize("name", RIGHT)
def test_overlapping_buffers_are_refused(name):
    first, other = full(1000), full(1000)
    shared = buffers(first)[name]
    untouched = copy_of(first)
    with pytest.raises(ValueError, match=r"must not overlap \(two of segments 0 and 1 do\); pass each tensor once"):
        native.adamw([first, with_buffers(other, {name: shared})], threads=2)
    assert_same_bits(first, untouched)


@pytest.mark.parametrize("name", RIGHT)
def test_buffers_that_overlap_by_one_element_are_refused(name):
    s = full(1000)
    n = buffers(s)[name].numel()
    outer = torch.zeros(2 * n, dtype=RIGHT[name])
    first = with_buffers(s, {name: outer[:n]})
    with pytest.raises(ValueError, match="must not overlap"):
        native.adamw([first, with_buffers(full(1000), {name: outer[n - 1 : -1]})], threads=1)
    native.adamw([first, with_buffers(full(1000), {name: outer[n:]})], threads=1)


def test_a_gradient_that_is_the_weight_is_refused():
    s = segment(8)
    with pytest.raises(ValueError, match=r"must not overlap \(two of segments 0 and 0 do\)"):
        native.adamw([replace(s, grad=s.weight)], threads=1)


# ---- norms, accumulation, the bound ----


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (zeros(4, torch.float64), r"tensor 1 must be torch\.float32 or torch\.bfloat16 \(got torch\.float64\)"),
        (zeros(4, device="meta"), r"tensor 1 must be on the CPU \(got meta\)"),
        (strided(4, torch.float32), "tensor 1 must be contiguous"),
    ],
    ids=["dtype", "device", "strides"],
)
def test_squared_norms_refuses_what_it_cannot_read(tensor, message):
    with pytest.raises(ValueError, match=message):
        native.squared_norms([zeros(3), tensor], threads=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": zeros(8, torch.float16)}, r"addition 1: target must be torch\.float32 or torch\.bfloat16"),
        ({"target": zeros(8, torch.bfloat16)}, "addition 1: target is bfloat16 and needs a remainder"),
        ({"remainder": zeros(8, torch.int16)}, "addition 1: remainder is the low half of a bfloat16 target"),
        ({"source": zeros(8, torch.bfloat16)}, r"source must be torch\.float32 \(got torch\.bfloat16\)"),
        ({"source": zeros(7)}, r"source must hold 8 elements \(got 7\)"),
        ({"source": strided(8, torch.float32)}, "source must be contiguous"),
        ({"source": zeros(8, device="meta")}, "source must be on the CPU"),
        ({"target": zeros(8, torch.bfloat16), "remainder": zeros(8)}, r"remainder must be torch\.int16"),
        ({"target": zeros(8, torch.bfloat16), "remainder": zeros(8, torch.int16)}, r"source must be torch\.bfloat16"),
    ],
    ids=range(9),
)
def test_accumulate_refuses_before_anything_is_written(change, message):
    good = Addition(target=zeros(8), source=torch.ones(8))
    bad = replace(Addition(target=zeros(8), source=zeros(8)), **change)
    with pytest.raises(ValueError, match=message):
        native.accumulate([good, bad], threads=1)
    assert (good.target == 0).all()


def test_accumulate_refuses_overlapping_buffers():
    shared = zeros(8)
    with pytest.raises(ValueError, match=r"must not overlap \(two of additions 0 and 0 do\)"):
        native.accumulate([Addition(target=shared, source=shared)], threads=1)
    pair = [Addition(target=shared, source=zeros(8)), Addition(target=shared, source=zeros(8))]
    with pytest.raises(ValueError, match=r"must not overlap \(two of additions 0 and 1 do\)"):
        native.accumulate(pair, threads=1)


@pytest.mark.parametrize("place", range(4))
def test_stream_refuses_what_it_cannot_stream(place):
    for tensor, message in (
        (zeros(8, torch.float64), r"must be torch\.float32"),
        (zeros(9), "must hold . elements"),
        (strided(8, torch.float32), "must be contiguous"),
    ):
        tensors = [zeros(8) for _ in range(4)]
        tensors[place] = tensor
        with pytest.raises(ValueError, match=message):
            native.stream(*tensors, threads=1)
    shared = [zeros(8) for _ in range(4)]
    shared[place] = shared[place - 1]
    with pytest.raises(ValueError, match="must not overlap"):
        native.stream(*shared, threads=1)


# ---- threads and instruction sets ----

CALLS = {
    "adamw": lambda **options: native.adamw([segment(8)], **options),
    "squared_norms": lambda **options: native.squared_norms([zeros(8)], **options),
    "accumulate": lambda **options: native.accumulate([Addition(target=zeros(8), source=zeros(8))], **options),
    "stream": lambda **options: native.stream(zeros(8), zeros(8), zeros(8), zeros(8), **options),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("threads", [0, -1, 1.5, None])
def test_threads_must_be_positive(call, threads):
    with pytest.raises(ValueError, match=r"threads must be an integer of 1 or more .*; pass usable_cores"):
        CALLS[call](threads=threads)


@pytest.mark.parametrize("call", CALLS)
def test_an_unknown_isa_is_refused_with_the_known_ones(call):
    with pytest.raises(ValueError, match=r"isa must be one .* \(got 'avx1024', it runs plain"):
        CALLS[call](threads=1, isa="avx1024")
    with pytest.raises(ValueError, match="isa must be one"):
        CALLS[call](threads=1, isa="")
