"""The Triton kernel on a GPU: the host's numbers, in one launch without temporary memory."""

import math
from dataclasses import replace

import pytest
import torch

from stronghold.native import BLOCK, Blocks
from tests.optim.test_adamw_on_device import (
    GRADIENTS,
    MOMENTS,
    WEIGHTS,
    assert_same_bits,
    copy_of,
    gradient,
    on,
    on_host,
    segment,
)

pytest.importorskip("triton", reason="needs triton: pip install triton")

from stronghold.optim import triton_adamw
from tests.optim.interpreted import PROGRAM, filled


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return "cuda"


def launches(work) -> list[str]:
    """Returns the names of the kernels that ``work`` launches."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        work()
        torch.cuda.synchronize()
    return [event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.gpu
@WEIGHTS
@GRADIENTS
@MOMENTS
@pytest.mark.parametrize("n", [1, 64, 16_001, 3 * 2**20 + 16])
def test_on_a_gpu_a_step_is_the_hosts(n, states, grad, weight, gpu):
    before = filled(segment((n,), weight, grad, states, grad_scale=0.37))
    mine, theirs = on(gpu, before), copy_of(before)
    for step in (1, 2, 3):
        change = gradient((n,), grad, step)
        moved = {name: tensor if tensor is None else tensor.to(gpu) for name, tensor in change.items()}
        triton_adamw.launch(replace(mine, step=step, **moved), squares=torch.ones((), dtype=torch.float64, device=gpu))
        on_host(replace(theirs, step=step, **change))
    got = on("cpu", mine)
    assert_same_bits(got, theirs)
    triton_adamw.launch(mine, squares=torch.full((), math.nan, dtype=torch.float64, device=gpu))
    assert_same_bits(on("cpu", mine), got)


LENGTHS = [3 * 2**20 + 16, 1, 64, 0, PROGRAM, 4096, 16_001, 80, 96, 112, 2**20, 31]


@pytest.mark.gpu
@WEIGHTS
@GRADIENTS
@MOMENTS
def test_on_a_gpu_segments_together_are_each_the_hosts(states, grad, weight, gpu):
    before = [filled(segment((n,), weight, grad, states, seed=n)) for n in LENGTHS]
    mine, theirs = [on(gpu, one) for one in before], [copy_of(one) for one in before]
    squares = torch.ones(len(LENGTHS), dtype=torch.float64, device=gpu)
    squares[5] = math.nan
    for step in (1, 2, 3):
        triton_adamw.launch_all([replace(one, step=step) for one in mine], list(squares.unbind()))
        for one in theirs:
            on_host(replace(one, step=step))
    for n, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        assert_same_bits(on("cpu", one), before[n] if n == 5 else other)


@pytest.mark.gpu
@MOMENTS
def test_on_a_gpu_a_step_of_many_parameters_is_one_launch_and_takes_no_memory(states, gpu):
    lengths = (5_000_000, 4096, 333_328, *[1024] * 9)
    parameters = [on(gpu, segment((n,), "bf16 and remainder", "bf16", states)) for n in lengths]
    triton_adamw.launch_all(parameters)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = launches(lambda: triton_adamw.launch_all([replace(one, step=2, lr=0.5) for one in parameters]))
    assert found == [triton_adamw.adamw_of_segments.__name__]
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.gpu
def test_on_a_gpu_more_than_two_to_the_31st_elements(gpu):
    n, begin = 2**31 + 3 * PROGRAM - 7, 2**31 - PROGRAM
    if torch.cuda.mem_get_info()[0] < 9 * n:
        pytest.skip("needs 20 GB of device memory")
    zeros = {name: torch.zeros(n, dtype=torch.bfloat16, device=gpu) for name in ("weight", "grad")}
    moments = [
        Blocks(
            codes=torch.zeros(n, dtype=torch.uint8, device=gpu),
            exponents=torch.zeros(-(-n // BLOCK), dtype=torch.uint8, device=gpu),
        )
        for _ in range(2)
    ]
    whole = replace(
        segment((1,), step=9),
        remainder=torch.zeros(n, dtype=torch.int16, device=gpu),
        exp_avg=moments[0],
        exp_avg_sq=moments[1],
        **zeros,
    )
    start = segment((n - begin,), "bf16 and remainder", "bf16", "8bit", step=9)
    behind = whole.part(begin, n)
    for name in ("weight", "remainder", "grad"):
        getattr(behind, name).copy_(getattr(start, name))
    triton_adamw.launch(whole)
    theirs = replace(start, first=begin)
    on_host(theirs)
    assert_same_bits(on("cpu", behind), theirs)
    assert not whole.weight[:begin].any()


@pytest.mark.gpu
def test_on_a_gpu_it_runs_in_the_current_stream_of_the_tensors_device(gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    mine, theirs = on("cuda:1", segment((4096,), states="8bit")), segment((4096,), states="8bit")
    stream = torch.cuda.Stream("cuda:1")
    with torch.cuda.device(0), torch.cuda.stream(stream):
        triton_adamw.launch(mine)
    stream.synchronize()
    on_host(theirs)
    assert_same_bits(on("cpu", mine), theirs)
