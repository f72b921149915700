"""The kernels run on any number of threads, from any number of callers, beside Python, and after a fork."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace

import pytest
import torch

from stronghold import native
from stronghold.native import Segment
from tests.native_cases import CHUNK, GRADS, ISAS, assert_same_bits, copy_of, segment

LENGTHS = (1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 0, 64)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("split_weight", [False, True])
@pytest.mark.parametrize("grad", GRADS)
def test_instruction_sets_and_threads_change_no_bit(grad, split_weight, blocks):
    before = [
        segment(n, seed=i, grad=grad, split_weight=split_weight, blocks=blocks, step=i + 1)
        for i, n in enumerate(LENGTHS)
    ]
    reference = [copy_of(s) for s in before]
    native.adamw(reference, threads=1, isa="plain")
    for isa in ISAS:
        for threads in (1, 2, 3, 7):
            mine = [copy_of(s) for s in before]
            native.adamw(mine, threads=threads, isa=isa)
            for a, b in zip(reference, mine, strict=True):
                assert_same_bits(a, b)


@pytest.mark.parametrize("isa", ISAS)
def test_the_bound_reads_four_arrays_and_writes_three(isa):
    n = CHUNK + 77
    tensors = [torch.randn(n, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    weight, grad, exp_avg, exp_avg_sq = (tensor.clone() for tensor in tensors)
    native.stream(weight, grad, exp_avg, exp_avg_sq, threads=2, isa=isa)
    added = 1 + 0.25 * grad.abs()
    assert torch.equal(grad, tensors[1])
    for got, before in ((weight, tensors[0]), (exp_avg, tensors[2]), (exp_avg_sq, tensors[3])):
        assert torch.equal(got, 0.5 * before + added)


def test_the_bound_stays_finite_and_normal():
    tensors = [torch.full((100,), 3e38), torch.linspace(-1e3, 1e3, 100), torch.full((100,), -1e-45), torch.zeros(100)]
    for _ in range(3000):
        native.stream(*tensors, threads=1)
    for tensor in (tensors[0], tensors[2], tensors[3]):
        torch.testing.assert_close(tensor, 2 + 0.5 * tensors[1].abs())


def test_a_thread_that_flushes_subnormals_gets_the_same_bits_and_keeps_its_mode():
    before = segment(5 * CHUNK)
    before.exp_avg_sq.fill_(1e-39)
    before.grad.mul_(1e-25)
    reference, mine = copy_of(before), copy_of(before)
    native.adamw([reference], threads=1)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormals")
    try:
        native.adamw([mine], threads=2)
        assert (torch.tensor([1e-39]) * 1).item() == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert (reference.exp_avg_sq > 0).all()
    assert_same_bits(reference, mine)


# ---- several callers ----


def test_callers_at_once_get_the_bits_of_callers_in_turn():
    callers, calls = 6, 15
    before = [segment(CHUNK * (1 + i % 3) + i, seed=i, blocks=i % 2 == 0) for i in range(callers)]
    expected = [copy_of(s) for s in before]
    for s in expected:
        for step in range(1, calls + 1):
            native.adamw([replace(s, step=step)], threads=1)
    mine, norms = [copy_of(s) for s in before], {}

    def work(i: int) -> None:
        for step in range(1, calls + 1):
            native.adamw([replace(mine[i], step=step)], threads=1 + (i + step) % 5)
        norms[i] = native.squared_norms([mine[i].weight], threads=3)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(callers):
        assert_same_bits(mine[i], expected[i])
        assert norms[i] == native.squared_norms([expected[i].weight], threads=1)


def test_the_interpreter_runs_while_a_kernel_does():
    n = 20_000_000
    zeros = [torch.zeros(n) for _ in range(4)]
    s = Segment(
        weight=zeros[0],
        grad=zeros[1],
        exp_avg=zeros[2],
        exp_avg_sq=zeros[3],
        lr=1e-3,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.1,
        step=1,
    )
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
    # With the lock held, Python could tick at the call's two root parameters at most.
    gaps = [b - a for a, b in zip([begin, *inside], [*inside, end], strict=True)]
    assert max(gaps) < (end - begin) / 2


def threads_of_this_process() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs Linux's /proc")
def test_the_pool_keeps_its_threads_and_they_sleep():
    s = segment(20 * CHUNK)
    native.adamw([s], threads=5)
    before = threads_of_this_process()
    for _ in range(20):
        native.adamw([s], threads=5)
        native.adamw([s], threads=2)
    assert threads_of_this_process() == before
    begin, used = time.perf_counter(), time.process_time()
    time.sleep(0.3)
    # Threads that spin would use as much processor time as there is.
    assert time.process_time() - used < 0.1 * (time.perf_counter() - begin)


# ---- processes ----


def in_a_process(code: str, **environment: str) -> str:
    """Returns what a program prints. It fails the test if it fails, or hangs for a minute."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        cwd=os.path.dirname(os.path.dirname(__file__)),
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_computes_as_its_parent_does():
    """A child has none of its parent's threads, and the locks as they were when it was forked."""
    assert "children 0 0 0 0 0\n" in in_a_process(
        """
        import os, threading
        import torch
        from tests.native_cases import CHUNK, assert_same_bits, copy_of, segment
        from stronghold import native

        torch.set_num_threads(1)  # OpenMP's own threads would hang in a child
        before = segment(4 * CHUNK)
        expected = copy_of(before)
        native.adamw([expected], threads=3)

        stop = threading.Event()
        def busy():  # so that children are forked while the pool is at work
            s = segment(8 * CHUNK, seed=1)
            while not stop.is_set():
                native.adamw([s], threads=3)
        thread = threading.Thread(target=busy)
        thread.start()
        children = []
        for _ in range(5):
            child = os.fork()
            if child == 0:
                mine = copy_of(before)
                native.adamw([mine], threads=3)
                assert_same_bits(mine, expected)
                if os.path.isdir("/proc/self/task"):
                    assert len(os.listdir("/proc/self/task")) == 3  # a pool of its own
                os._exit(0)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        stop.set()
        thread.join()
        mine = copy_of(before)
        native.adamw([mine], threads=4)
        assert_same_bits(mine, expected)
        print("children", *statuses)
        """
    )


def test_a_program_ends_while_a_daemon_thread_is_in_a_kernel():
    """As the thread of a stream may be. The kernel ends after the interpreter, which unwinds the thread."""
    in_a_process(
        """
        import threading
        from tests.native_cases import CHUNK, segment
        from stronghold import native

        s = segment(100 * CHUNK)
        started = threading.Event()
        def forever():
            while True:
                started.set()
                native.adamw([s], threads=3)
        threading.Thread(target=forever, daemon=True).start()
        started.wait()
        """
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PyTorch's OpenMP is found on Linux")
def test_the_thread_that_computes_has_kernels_on_pytorch_s_threads_and_no_bit_changes():
    assert "shared out: True\na thread more: 0, 2\nthe same child: 0\n" in in_a_process(
        """
        import os, threading, time
        import torch
        from tests.native_cases import CHUNK, assert_same_bits, copy_of, segment
        from stronghold import native

        def threads():
            return len(os.listdir("/proc/self/task"))

        torch.set_num_threads(3)
        torch.ones(1 << 22).exp_()  # which begins its threads
        before = segment(9 * CHUNK + 5)
        expected, mine = copy_of(before), copy_of(before)
        native.adamw([expected], threads=1)
        there = threads()
        torch.set_flush_denormal(True)
        native.in_team(lambda: native.adamw([mine], threads=6))  # PyTorch's three are enough
        torch.set_flush_denormal(False)
        assert_same_bits(mine, expected)
        norms = []
        native.in_team(lambda: norms.append(native.squared_norms([expected.weight], threads=3)))
        assert norms == [native.squared_norms([expected.weight], threads=1)]
        more = threads() - there

        def used():  # seconds of processor time, of all threads but this one
            own = str(threading.get_native_id())
            times = [open(f"/proc/self/task/{each}/stat").read().rpartition(")")[2].split()[11:13]
                     for each in os.listdir("/proc/self/task") if each != own]
            return sum(map(int, sum(times, []))) / os.sysconf("SC_CLK_TCK")

        helped, begin = used(), time.thread_time()
        native.in_team(lambda: [native.adamw([mine], threads=3) for _ in range(300)])
        print("shared out:", used() - helped > 0.3 * (time.thread_time() - begin))
        try:
            native.in_team(lambda: 1 / 0)
        except ZeroDivisionError:
            pass
        native.adamw([copy_of(before)], threads=3)  # out of it: the pool
        print(f"a thread more: {more}, {threads() - there}")

        mine = copy_of(before)
        child = os.fork()
        if child == 0:
            native.in_team(lambda: native.adamw([mine], threads=3))  # by a pool of its own
            torch.set_num_threads(1)  # OpenMP's own threads would hang
            assert_same_bits(mine, expected)
            os._exit(0)
        print("the same child:", os.waitpid(child, 0)[1])
        """
    )


COUNTING_OPENMP = """
#include <dlfcn.h>
int regions = 0;
void counted(void (*work)(void*), void* data, unsigned threads, unsigned flags) {
  ++regions;
  void (*next)(void (*)(void*), void*, unsigned, unsigned) = dlvsym(RTLD_NEXT, "GOMP_parallel", "GOMP_4.0");
  next(work, data, threads, flags);
}
__asm__(".symver counted, GOMP_parallel@@GOMP_4.0");
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PyTorch's OpenMP is found on Linux")
def test_an_openmp_that_is_preloaded_is_pytorchs_and_has_the_kernels_too(tmp_path):
    """As people preload libiomp5.so: a team of another OpenMP's would find PyTorch's threads spinning on its cores."""
    (tmp_path / "openmp.c").write_text(COUNTING_OPENMP)
    (tmp_path / "versions").write_text("GOMP_4.0 { global: GOMP_parallel; regions; };")
    library = str(tmp_path / "openmp.so")
    compiler = [os.environ.get("CXX", "g++"), "-x", "c", "-w", "-D_GNU_SOURCE", "-shared", "-fPIC"]
    subprocess.run(
        [*compiler, f"-Wl,--version-script={tmp_path}/versions", str(tmp_path / "openmp.c"), "-o", library, "-ldl"],
        check=True,
    )
    told = in_a_process(
        f"""
        import ctypes
        import torch
        from stronghold import native
        from tests.native_cases import CHUNK, segment

        regions = ctypes.c_int.in_dll(ctypes.CDLL({library!r}), "regions")
        torch.set_num_threads(2)
        torch.ones(1 << 22).exp_()
        mine = segment(9 * CHUNK)
        pytorchs, regions.value = regions.value, 0
        native.in_team(lambda: native.adamw([mine], threads=2))
        print(pytorchs > 0, regions.value > 0)
        """,
        LD_PRELOAD=library,
    )
    assert told == "True True\n"
