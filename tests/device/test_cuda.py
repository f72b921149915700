"""The CUDA device without CUDA: its calls, against a stand-in for torch.cuda that is strict about their order.

The stand-in runs nothing late; it keeps to CUDA's rules that a wait for an event that was never recorded is no wait,
and that a copy belongs to the stream that is current. What a real GPU makes of it, tests/test_gpu.py sees.
"""

from __future__ import annotations

import threading
import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import stronghold
from stronghold.device import cuda as cuda_module
from stronghold.device.memory import HostBuffer
from tests.test_ordering import Model, train


class FakeEvent:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.recorded_on = None
        self.timing = enable_timing

    def record(self, stream) -> None:
        self.recorded_on = stream

    def query(self) -> bool:
        assert self.recorded_on is not None
        return True

    def synchronize(self) -> None:
        assert self.recorded_on is not None, "synchronised with an event that was never recorded"

    def elapsed_time(self, other) -> float:
        assert self.timing
        assert other.timing
        return 1.0


class FakeStream:
    def __init__(self, device=None) -> None:
        self.waited: list[FakeEvent] = []

    def wait_event(self, event: FakeEvent) -> None:
        assert event.recorded_on is not None, "a wait for an event that was never recorded is none"
        self.waited.append(event)

    def query(self) -> bool:
        return True


class FakeCuda:
    """What cuda.py uses of torch.cuda."""

    Event = FakeEvent
    Stream = FakeStream

    def __init__(self) -> None:
        self.compute = FakeStream()
        self._current = threading.local()
        self.streams_used: set[FakeStream] = set()
        self.fraction = 1.0

    def init(self) -> None:
        pass

    def current_device(self) -> int:
        return 0

    def set_device(self, device) -> None:
        pass

    @contextmanager
    def device(self, device):
        yield

    @contextmanager
    def stream(self, stream):
        self._current.stream = stream
        self.streams_used.add(stream)
        yield
        self._current.stream = None

    def current_stream(self, device=None) -> FakeStream:
        return getattr(self._current, "stream", None) or self.compute

    def mem_get_info(self, device) -> tuple[int, int]:
        return 1 << 30, 1 << 31

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(total_memory=1 << 31)

    def set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
        assert isinstance(fraction, float)
        assert isinstance(index, int)  # torch takes no device without an index here
        self.fraction = fraction

    def get_per_process_memory_fraction(self, device) -> float:
        return self.fraction

    def memory_allocated(self, device) -> int:
        return 1 << 20

    def max_memory_allocated(self, device) -> int:
        return 123


class FakeDriver:
    def __init__(self, result: int) -> None:
        self.result = result
        self.registered: list[int] = []
        self.unregistered = 0

    def cuMemHostRegister_v2(self, address, length, flags) -> int:
        self.registered.append(length.value)
        return self.result

    def cuMemHostUnregister(self, address) -> int:
        self.unregistered += 1
        return 0


class CudaOnCpu(cuda_module.CudaDevice):
    """The CUDA device with its buffers in ordinary memory."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda", 0))
        self.torch_device = torch.device("cpu")


@pytest.fixture
def driver(monkeypatch):
    driver = FakeDriver(result=0)
    fake = FakeCuda()
    monkeypatch.setattr(cuda_module, "torch", SimpleNamespace(**{**vars(torch), "cuda": fake}))
    monkeypatch.setattr(cuda_module.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(cuda_module, "_warned", threading.Event())
    driver.cuda = fake
    return driver


@pytest.mark.parametrize(
    "settings",
    [{}, {"window": 1}, {"accumulate": 2}, {"update": "in_backward"}, {"activations": "host"}, {"activations": "keep"}],
)
def test_it_trains_as_the_cpu_does(driver, settings):
    device = CudaOnCpu()
    assert train(device, **settings) == train("cpu", **settings)
    # Copies went to the copy streams, each of which waited for the computation.
    assert device.fetches.cuda in driver.cuda.streams_used
    assert device.gradients.cuda in driver.cuda.streams_used
    assert any(event.recorded_on is driver.cuda.compute for event in device.fetches.cuda.waited)
    assert any(event.recorded_on is driver.cuda.compute for event in device.gradients.cuda.waited)
    assert any(event.recorded_on is device.fetches.cuda for event in driver.cuda.compute.waited)


def test_pinned_memory_is_registered_to_the_byte(driver):
    device = CudaOnCpu()
    stronghold.offload(model := Model(), window=2, device=device)
    optimizer = stronghold.AdamW(model.parameters())
    report = stronghold.report(model)
    assert report.states == optimizer.states
    assert sum(driver.registered) == report.pinned_host_bytes
    assert report.pinned_host_bytes > 0
    assert report.pageable_host_bytes > 0  # the moments need no pinning


def test_where_pinning_is_refused_it_says_so_once_and_goes_on(driver):
    driver.result = 999
    with pytest.warns(RuntimeWarning, match="pinning .* refused .* pageable") as caught:
        device = CudaOnCpu()
        stronghold.offload(model := Model(), window=2, device=device)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not device.host_buffer(100).pinned
    assert stronghold.report(model).pinned_host_bytes == 0


def test_memory_is_unpinned_before_it_goes(driver):
    device = CudaOnCpu()
    buffer = device.host_buffer(4096)
    assert isinstance(buffer, HostBuffer)
    assert buffer.pinned
    del buffer
    assert driver.unregistered == 1


def test_an_event_waits_until_it_has_been_recorded(driver):
    device = CudaOnCpu()
    gate = stronghold.device.Event()
    device.fetches.wait(gate)  # as for an update on the host
    event = device.fetches.record()
    assert not event.happened
    gate.happen()
    event.wait()
    assert event.happened
    assert event.cuda.recorded_on is device.fetches.cuda


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
@pytest.mark.parametrize(
    ("limit", "fraction", "free"),
    [(1 << 29, 0.25, (1 << 29) - (1 << 20)), (3 << 29, 0.75, 1 << 30), (1 << 40, 1.0, 1 << 30), (1, 2**-31, 0)],
)
def test_what_is_free_is_within_the_processs_limit(driver, monkeypatch, device, limit, fraction, free):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    stronghold.device.limit_memory(device, limit)
    assert driver.cuda.fraction == fraction
    assert CudaOnCpu().free_bytes() == free


def test_memory_of_a_device_that_is_not_there_is_not_limited(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device 'cuda' needs a CUDA device"):
        stronghold.device.limit_memory("cuda", 1024)
