"""To the bit: no window, activation setting, update order or thread count changes a loss or a weight."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.crossed import crossed, few
from tests.reference import CASES, Case, differences, offloaded, snapshot, train

STEPS = 3
ACTIVATIONS = ("recompute", "keep", "host")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train the same thing."""

    window: int = 1
    activations: str = "recompute"
    update: str = "deferred"
    threads: int = 1
    dtype: torch.dtype = torch.float32
    accumulation: int = 1
    clip: float | None = None
    micro_batch: int | None = None
    batch: int = 2
    dropout: bool = True
    resident: int = 0
    states: str = "fp32"


def run(case: Case, way: Way) -> tuple[list[float], dict[str, dict[str, torch.Tensor]]]:
    model, optimizer = offloaded(
        case,
        window=way.window,
        activations=way.activations,
        dtype=way.dtype,
        micro_batch=way.micro_batch,
        resident=way.resident,
        adamw={"update": way.update, "threads": way.threads, "states": way.states},
    )
    model.train(way.dropout)
    batches = case.batches(STEPS * way.accumulation, size=way.batch)
    losses = train(model, optimizer, batches, accumulation=way.accumulation, clip=way.clip, warmup=2)
    return losses, snapshot(model, optimizer)


first = cache(run)


def check(case: Case, way: Way, like: Way) -> None:
    losses, final = run(case, way)
    expected_losses, expected = first(case, like)
    assert losses == expected_losses, way
    assert differences(final, expected) == [], way


FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
DTYPES = pytest.mark.parametrize("dtype", FORMATS, ids=FORMATS.get)
WAYS = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["some", "every"])
"""Either some of the ways, with every value and where three settings or more are crossed every pair, or all of them."""


def crossing(every: bool, *values: Sequence[Any]) -> list[tuple[Any, ...]]:
    return list(itertools.product(*values)) if every else few(*values, together=2 if len(values) > 2 else 1)


@WAYS
@pytest.mark.parametrize(("name", "dtype"), crossed(["gpt", "t5", "mixtral"], FORMATS, together=1), ids=FORMATS.get)
def test_every_way_gives_the_same_bits(name: str, dtype: torch.dtype, every: bool) -> None:
    case, usual = CASES[name], Way(dtype=dtype)
    windows = range(1, case.layers + 1)
    for values in crossing(every, windows, ACTIVATIONS, ("deferred", "in_backward"), (1, 2)):
        window, activations, update, threads = values
        way = replace(usual, window=window, activations=activations, update=update, threads=threads)
        check(case, way, usual)


@WAYS
@pytest.mark.parametrize(("name", "dtype"), crossed(["gpt", "bart", "qwen2_moe"], FORMATS, together=1), ids=FORMATS.get)
def test_clipping_and_accumulation_do_not_change_that(name: str, dtype: torch.dtype, every: bool) -> None:
    case, usual = CASES[name], Way(dtype=dtype, accumulation=3, clip=0.5)
    for window, activations in crossing(every, range(1, case.layers + 1), ACTIVATIONS):
        check(case, replace(usual, window=window, activations=activations, threads=2), usual)


@WAYS
@pytest.mark.parametrize(
    ("name", "states", "dtype"), crossed(["gpt", "t5"], ["fp32", "8bit"], FORMATS, together=1), ids=FORMATS.get
)
def test_resident_layers_give_the_same_bits(name: str, states: str, dtype: torch.dtype, every: bool) -> None:
    case, usual = CASES[name], Way(dtype=dtype, states=states)
    for resident, activations, update in crossing(
        every, range(1, case.layers + 1), ACTIVATIONS, ("deferred", "in_backward")
    ):
        window = min(2, case.layers)
        check(case, replace(usual, resident=resident, window=window, activations=activations, update=update), usual)


@WAYS
@DTYPES
def test_resident_layers_clip_and_accumulate_to_the_same_bits(dtype: torch.dtype, every: bool) -> None:
    case, usual = CASES["gpt"], Way(dtype=dtype, accumulation=3, clip=0.5)
    for resident, activations in crossing(every, range(1, case.layers + 1), ACTIVATIONS):
        check(case, replace(usual, resident=resident, activations=activations, threads=2), usual)
    check(case, replace(usual, resident=2, micro_batch=2), usual)


@WAYS
@DTYPES
def test_eight_bit_moments_are_the_same_in_every_way(dtype: torch.dtype, every: bool) -> None:
    case, usual = CASES["gpt"], Way(dtype=dtype, states="8bit")
    for window, update, threads in crossing(every, (1, 2, case.layers), ("deferred", "in_backward"), (1, 2)):
        check(case, replace(usual, window=window, update=update, threads=threads), usual)


def test_running_statistics_are_those_of_one_forward_pass() -> None:
    """A batch norm's buffers change in the first run of a layer, and not again in the second."""
    case, usual = CASES["resnet"], Way()
    for window, activations in itertools.product(range(1, case.layers + 1), ACTIVATIONS):
        check(case, replace(usual, window=window, activations=activations), usual)


@pytest.mark.parametrize(
    ("name", "dtype"), crossed(["gpt", "llama", "t5", "mixtral"], FORMATS, together=1), ids=FORMATS.get
)
def test_a_micro_batch_of_the_whole_batch_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    case, usual = CASES[name], Way(dtype=dtype, window=2, batch=3)
    for activations, micro_batch in itertools.product(ACTIVATIONS, (3, 4)):
        check(case, replace(usual, activations=activations, micro_batch=micro_batch), usual)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("gpt", "llama", "bart", "mixtral") else pytest.mark.long)
        for name in CASES
        if name != "resnet"
    ],
)
def test_smaller_micro_batches_change_the_rounding_only(name: str) -> None:
    """The decoders fill their default key-value cache, which is cut like the batch; padding masks are cut too."""
    case, usual = CASES[name], Way(batch=5, dropout=False, accumulation=2, clip=0.5)
    expected_losses, expected = first(case, usual)
    for micro_batch, activations in ((1, "recompute"), (2, "keep"), (3, "host")):
        losses, final = run(case, replace(usual, micro_batch=micro_batch, activations=activations, window=2))
        torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=0.0)
        for parameter, tensors in expected.items():
            if "exp_avg" in tensors:
                distance = torch.dist(final[parameter]["exp_avg"], tensors["exp_avg"])
                assert distance <= 1e-4 * tensors["exp_avg"].norm() + 1e-8, (parameter, micro_batch)
