"""The accelerator in software keeps to what a GPU does: memory, streams, events, autograd, random numbers, errors."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.gpu import SOFT, needs_device

pytestmark = [pytest.mark.gpu, needs_device, pytest.mark.skipif(SOFT is None, reason="is about the one in software")]


LONG_US = 400_000
"""Longer than a busy machine leaves a thread waiting."""


@pytest.fixture(autouse=True)
def _in_time():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the device's streams compute
    yield
    torch.set_num_threads(threads)
    SOFT.slow(None, 0)
    SOFT.late(0, 0)
    torch.accelerator.synchronize()


def test_the_host_cannot_touch_its_memory_and_the_place_is_told():
    script = (
        "import ctypes, faulthandler, torch\n"
        "faulthandler.enable()\n"
        "from tests.accelerator import soft\n"
        "x = torch.ones(4, device='soft')\n"
        "torch.accelerator.synchronize()\n"
        "def look(): return ctypes.c_float.from_address(x.data_ptr()).value\n"
        "look()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == -11
    assert "Segmentation fault" in done.stderr
    assert "in look" in done.stderr


def test_freed_memory_is_lent_out_at_once_and_holds_no_numbers():
    before = torch.ones(1000, device="soft")
    address = before.data_ptr()
    del before
    after = torch.empty(1000, device="soft")
    assert after.data_ptr() == address
    assert after.isnan().all()


def test_a_copy_from_memory_that_is_not_pinned_blocks():
    ordinary = torch.randn(100)
    pinned = ordinary.pin_memory()
    assert pinned.is_pinned()
    assert not ordinary.is_pinned()
    target = torch.empty(100, device="soft")
    SOFT.slow(None, LONG_US)
    done = []
    for source in (pinned, ordinary):
        target.copy_(source, non_blocking=True)
        done.append(torch.accelerator.current_stream().query())
    SOFT.slow(None, 0)
    assert done == [False, True]
    assert torch.equal(target.cpu(), ordinary)


@pytest.mark.parametrize("waits", [True, False])
def test_a_missing_wait_is_reported_where_no_delay_hits_it(waits):
    stream, host = torch.Stream("soft"), torch.full((1000,), 7.0).pin_memory()
    target = torch.zeros(1000, device="soft")
    with SOFT.checked() as races:
        with stream:
            target.copy_(host, non_blocking=True)
            event = stream.record_event()
        event.synchronize() if waits else time.sleep(0.5)  # by the clock it is over in both
        twice = target * 2
    assert torch.equal(twice.cpu(), torch.full((1000,), 14.0))
    assert bool(races) is not waits
    assert all("a copy from the host" in race for race in races)


@pytest.mark.parametrize("told", [True, False])
def test_memory_that_another_stream_uses_is_freed_too_early_unless_it_is_told(told):
    stream, tensor = torch.Stream("soft"), torch.ones(4096, device="soft")
    torch.accelerator.synchronize()
    with SOFT.checked() as races:
        SOFT.slow(stream, LONG_US)
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            more = tensor + 1
        if told:
            tensor.record_stream(stream)
        del tensor
        torch.accelerator.synchronize()
    SOFT.slow(stream, 0)
    assert bool((more == 2).all()) is told
    assert bool(races) is not told


@pytest.mark.parametrize("ordered", [True, False])
def test_a_race_of_two_threads_of_the_host_is_reported(ordered):
    memory = torch.zeros(64).pin_memory()
    told, done = [], threading.Event()

    def write() -> None:
        SOFT.enter("another")
        SOFT.touch(memory, write=True, by="another")
        told.append(SOFT.Told())
        done.set()

    with SOFT.checked() as races:
        thread = threading.Thread(target=write)
        thread.start()
        done.wait()
        if ordered:
            told[0].hear()
        SOFT.touch(memory, write=False, by="this")
        thread.join()
    assert bool(races) is not ordered


def test_events_tell_the_time_and_whether_they_have_happened():
    begin, end = (torch.Event("soft", enable_timing=True) for _ in range(2))
    SOFT.slow(None, LONG_US)
    begin.record()
    torch.ones(3, device="soft")
    end.record()
    assert not end.query()
    end.synchronize()
    assert end.query()
    assert begin.elapsed_time(end) >= LONG_US / 1e3


def test_the_current_stream_is_a_threads_own():
    stream, seen = torch.Stream("soft"), []
    with stream:
        thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_stream().stream_id))
        thread.start()
        thread.join()
        assert torch.accelerator.current_stream() == stream
    assert seen == [0]


def test_autograd_has_a_thread_of_its_own_and_goes_on_in_the_forward_passes_stream():
    seen, stream, parameter = [], torch.Stream("soft"), torch.ones(3, device="soft", requires_grad=True)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        twice = parameter * 2
        twice.register_hook(lambda _: seen.append((threading.get_ident(), torch.accelerator.current_stream())))
        total = twice.sum()
    torch.accelerator.current_stream().wait_stream(stream)
    total.backward()
    (thread, its_stream), *_ = seen
    assert thread != threading.main_thread().ident
    assert its_stream == stream
    assert torch.equal(parameter.grad.cpu(), torch.full((3,), 2.0))


def test_random_numbers_are_those_of_their_state():
    torch.manual_seed(3)
    first, state = torch.rand(5, device="soft").cpu(), torch.soft.get_rng_state()
    second = torch.randn(5, device="soft").cpu()
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(5, device="soft").cpu())
    torch.soft.set_rng_state(state)
    assert torch.equal(second, torch.randn(5, device="soft").cpu())
    kept = F.dropout(torch.ones(10_000, device="soft"), 0.25).ne(0).float().mean().item()
    assert kept == pytest.approx(0.75, abs=0.02)


def test_a_checkpoint_runs_again_with_the_same_numbers():
    linear, x = nn.Linear(32, 32).to("soft"), torch.randn(8, 32, device="soft", requires_grad=True)
    found = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.relu(linear(x)), 0.5)

    for again in (False, True):
        torch.manual_seed(5)
        linear.zero_grad()
        x.grad = None
        y = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        y.square().sum().backward()
        found.append((linear.weight.grad.cpu(), x.grad.cpu()))
    assert all(map(torch.equal, *found))


def test_data_moves_between_the_devices():
    parameter = nn.Parameter(torch.randn(3))
    host = parameter.data
    parameter.data = host.to("soft")
    (parameter * 2).sum().backward()
    assert parameter.grad.device.type == "soft"
    parameter.grad = None
    parameter.data = host
    assert parameter.device.type == "cpu"


def test_autocast_has_its_lists():
    linear, x = nn.Linear(32, 32).to("soft"), torch.randn(8, 32, device="soft")
    with torch.autocast("soft", torch.bfloat16):
        y = linear(x)
        loss = F.cross_entropy(y, torch.zeros(8, dtype=torch.long, device="soft"))
    loss.backward()
    assert (y.dtype, loss.dtype, linear.weight.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)


def test_what_a_user_does_wrong_is_an_error():
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(3, device="soft") + torch.ones(3)
    with pytest.raises(RuntimeError, match="size"):
        torch.ones(3, device="soft") + torch.ones(4, device="soft")
    wrong = torch.ones(3, device="soft")[torch.tensor([5], device="soft")]  # as on CUDA, told when it is waited for
    with pytest.raises(RuntimeError, match="index 5 is out of bounds"):
        wrong.cpu()


def test_memory_has_an_end_and_a_peak():
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    with SOFT.limited(2**30), pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**30 + 1, dtype=torch.uint8, device="soft")
    tensor = torch.empty(1000, dtype=torch.uint8, device="soft")
    assert torch.accelerator.memory_allocated() - before == 1024
    del tensor
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() == before + 1024


MODULES = {
    "convolution": (lambda: nn.Conv1d(4, 4, 3), (2, 4, 8)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 8)),
    "RMS norm": (lambda: nn.RMSNorm(8), (2, 8)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0), (2, 3, 8)),
    "batch norm": (lambda: nn.BatchNorm1d(4), (2, 4, 8)),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_compute_what_the_cpu_does(name, dtype):
    build, shape = MODULES[name]
    torch.manual_seed(0)
    module, x = build().to(dtype), torch.randn(shape, dtype=dtype)
    found = []
    for device in ("cpu", "soft"):
        module.to(device).zero_grad()
        y = module(x.to(device))
        y.square().sum().backward()
        gradients = (parameter.grad.detach().cpu().clone() for parameter in module.parameters())
        found.append([y.detach().cpu(), *gradients])
    assert all(map(torch.equal, *found))
    assert SOFT.wrong_shapes() == []


OPERATORS = {
    "sort": lambda x: x.sort()[0],
    "topk": lambda x: x.topk(2)[0],
    "nonzero": lambda x: (x > 0).nonzero(),
    "mask": lambda x: x[x > 0],
    "cumsum": lambda x: x.cumsum(0),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "foreach": lambda x: torch._foreach_norm([x, x])[0],
    "cat": lambda x: torch.cat([x, x]),
    "scatter": lambda x: x.scatter_add(0, torch.zeros(6, 6, dtype=torch.long, device=x.device), x),
    "index_put": lambda x: x.index_put((torch.tensor([1]),), x[0]),
    "svd": lambda x: torch.linalg.svd(x)[1],
    "std": lambda x: x.std(),
    "as another dtype": lambda x: x.view(torch.int32),
    "dlpack": lambda x: torch.from_dlpack(x[2:4]),
}


def test_it_counts_integers_as_cuda_does():
    counts = torch.histc(torch.tensor([0, 2, 2, 3], dtype=torch.int32).to("soft"), bins=4, min=0, max=3)
    assert counts.dtype == torch.int32
    assert counts.tolist() == [1, 0, 2, 1]


def test_attention_is_compiled():
    x = torch.randn(2, 2, 4, 8, generator=torch.Generator().manual_seed(1))

    def attend(x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    def values_of(function, x):
        x = x.clone().requires_grad_()
        y = function(x)
        y.square().sum().backward()
        return y.detach().cpu(), x.grad.cpu()

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, values_of(compiled, x.to("soft")), values_of(attend, x)))


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_compute_what_the_cpu_does(name):
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    assert torch.equal(OPERATORS[name](x.to("soft")).cpu(), OPERATORS[name](x))
