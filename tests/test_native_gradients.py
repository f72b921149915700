"""Norms and accumulation of gradients, against float64 sums and torch's additions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stronghold import native
from stronghold.native import Addition
from tests.native_cases import CHUNK, ISAS, all_patterns, bits, joined, split, spread

LENGTHS = (1, 15, 16, 17, 255, 256, 257, CHUNK, 2 * CHUNK + 9, 0)


def values(n: int, seed: int = 0) -> Tensor:
    return spread(n, 0.1, torch.Generator().manual_seed(seed))


# ---- squared_norms ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isa", ISAS)
def test_each_norm_is_its_tensors_float64_sum(isa, dtype):
    tensors = [values(n, seed=n).to(dtype) for n in LENGTHS]
    norms = native.squared_norms(tensors, threads=2, isa=isa)
    exact = [math.fsum(x * x for x in tensor.double().tolist()) for tensor in tensors]
    assert norms == pytest.approx(exact, rel=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_the_same_bits_for_every_isa_thread_count_and_company(dtype):
    tensors = [values(n, seed=n).to(dtype) for n in (3 * CHUNK + 5, 31, CHUNK - 1, 5 * CHUNK)]
    results = {
        tuple(native.squared_norms(tensors, threads=threads, isa=isa)) for isa in ISAS for threads in (1, 2, 3, 7)
    }
    results.add(tuple(native.squared_norms([tensor], threads=1)[0] for tensor in tensors))
    assert len(results) == 1


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 5, CHUNK - 1, CHUNK, 2 * CHUNK + 2])
def test_a_norm_shows_what_is_not_finite_and_only_that(isa, dtype, place):
    tensor = torch.full((2 * CHUNK + 3,), 3e38).to(dtype)  # the largest squares float32 could not hold
    assert math.isfinite(native.squared_norms([tensor], threads=2, isa=isa)[0])
    tensor[place] = -math.inf
    assert native.squared_norms([tensor.clone().fill_(1.0), tensor], threads=2, isa=isa) == [2 * CHUNK + 3, math.inf]
    tensor[place] = math.nan
    assert math.isnan(native.squared_norms([tensor], threads=2, isa=isa)[0])


@settings(max_examples=60)
@given(
    floats=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=70),
    offset=st.integers(0, 17),
    isa=st.sampled_from(ISAS),
)
def test_the_norm_of_any_values_at_any_offset(floats, offset, isa):
    tensor = torch.tensor([math.nan] * offset + floats + [math.nan], dtype=torch.float32)[offset:-1]
    exact = math.fsum(value * value for value in floats)
    assert native.squared_norms([tensor], threads=1, isa=isa) == [pytest.approx(exact, rel=1e-14, abs=1e-320)]


def test_no_tensors_have_no_norms():
    assert native.squared_norms([], threads=1) == []
    assert native.squared_norms([torch.zeros(0)], threads=2) == [0.0]


# ---- accumulate ----


@pytest.mark.parametrize("isa", ISAS)
def test_float32_sources_are_added_as_torch_adds_them(isa):
    targets = [values(n, seed=n) for n in LENGTHS]
    sources = [values(n, seed=n + 1) for n in LENGTHS]
    expected = [target + source for target, source in zip(targets, sources, strict=True)]
    additions = [Addition(target=t, source=s) for t, s in zip(targets, sources, strict=True)]
    kept = [source.clone() for source in sources]
    norms = native.accumulate(additions, threads=3, isa=isa)
    for target, source, total, before in zip(targets, sources, expected, kept, strict=True):
        assert torch.equal(bits(target), bits(total))
        assert torch.equal(source, before)
    assert norms == native.squared_norms(expected, threads=1)


@pytest.mark.parametrize("isa", ISAS)
def test_bf16_sources_are_added_to_split_targets_in_float32(isa):
    wholes = [values(n, seed=n) for n in LENGTHS]
    sources = [values(n, seed=n + 1).bfloat16() for n in LENGTHS]
    halves = [split(whole) for whole in wholes]
    expected = [whole + source.float() for whole, source in zip(wholes, sources, strict=True)]
    additions = [
        Addition(target=high, remainder=low, source=source) for (high, low), source in zip(halves, sources, strict=True)
    ]
    norms = native.accumulate(additions, threads=3, isa=isa)
    for (high, low), total in zip(halves, expected, strict=True):
        assert torch.equal(bits(high), bits(split(total)[0]))
        assert torch.equal(low, split(total)[1])
    assert norms == native.squared_norms(expected, threads=1)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_each_of_many_small_tensors_is_added_to_once(threads):
    targets = [values(1 + i % 20, seed=i) for i in range(1003)]
    sources = [values(1 + i % 20, seed=-i - 1) for i in range(1003)]
    expected = [target + source for target, source in zip(targets, sources, strict=True)]
    additions = [Addition(target=t, source=s) for t, s in zip(targets, sources, strict=True)]
    assert native.accumulate(additions, threads=threads) == native.squared_norms(expected, threads=threads)
    assert all(torch.equal(target, total) for target, total in zip(targets, expected, strict=True))


@pytest.mark.parametrize("isa", ISAS)
def test_adding_nothing_keeps_every_number(isa):
    numbers = all_patterns()
    numbers = numbers[~numbers.isnan()]
    high, low = split(numbers)
    source = torch.full((numbers.numel(),), -0.0, dtype=torch.bfloat16)
    addition = Addition(target=high.clone(), remainder=low.clone(), source=source)
    assert native.accumulate([addition], threads=2, isa=isa) == [math.inf]
    assert torch.equal(bits(addition.target), bits(high))
    assert torch.equal(addition.remainder, low)


def test_a_hundred_micro_batches_lose_nothing():
    total, high = torch.zeros(1000), torch.zeros(1000, dtype=torch.bfloat16)
    low = torch.zeros(1000, dtype=torch.int16)
    for seed in range(100):
        source = values(1000, seed=seed).bfloat16()
        total += source.float()
        norms = native.accumulate([Addition(target=high, remainder=low, source=source)], threads=1)
    assert torch.equal(bits(joined(high, low)), bits(total))
    assert norms == native.squared_norms([total], threads=1)


@pytest.mark.parametrize("isa", ISAS)
def test_an_accumulated_nan_shows(isa):
    high, low = split(torch.ones(40))
    source = torch.zeros(40, dtype=torch.bfloat16)
    source[17] = math.nan
    assert math.isnan(native.accumulate([Addition(target=high, remainder=low, source=source)], threads=1, isa=isa)[0])
    assert high.isnan().nonzero().flatten().tolist() == [17]
    assert joined(high, low).isnan().nonzero().flatten().tolist() == [17]
    whole, source = torch.ones(40), torch.zeros(40)
    source[3] = math.inf
    assert native.accumulate([Addition(target=whole, source=source)], threads=1, isa=isa) == [math.inf]


@settings(max_examples=60)
@given(
    n=st.one_of(st.integers(0, 300), st.integers(CHUNK - 2, CHUNK + 2)),
    offsets=st.lists(st.integers(0, 19), min_size=3, max_size=3),
    isa=st.sampled_from(ISAS),
    threads=st.integers(1, 3),
)
def test_any_length_at_any_offset_adds_to_its_own_elements_alone(n, offsets, isa, threads):
    high, low = split(values(n))
    tensors = [high, low, values(n, seed=1).bfloat16()]
    reference = [tensor.clone() for tensor in tensors]
    expected = native.accumulate(
        [Addition(target=reference[0], remainder=reference[1], source=reference[2])], threads=1, isa="plain"
    )
    outer = [torch.full((n + 48,), 7.0).to(tensor.dtype) for tensor in tensors]
    views = [buffer[offset : offset + n] for buffer, offset in zip(outer, offsets, strict=True)]
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    addition = Addition(target=views[0], remainder=views[1], source=views[2])
    assert native.accumulate([addition], threads=threads, isa=isa) == expected
    for buffer, view, right, offset in zip(outer, views, reference, offsets, strict=True):
        assert torch.equal(bits(view), bits(right))
        assert (torch.cat([buffer[:offset], buffer[offset + n :]]) == 7).all()
