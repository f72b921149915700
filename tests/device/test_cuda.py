"""The CUDA device without CUDA: its calls, against a stand-in for torch.cuda that is strict about their order.

The stand-in runs nothing late; it keeps to CUDA's rules that a wait for an event that was never recorded is no wait,
and that a copy belongs to the stream that is current. What a real GPU makes of it, tests/test_gpu.py sees.
"""

from __future__ import annotations

import gc
import threading
import time
import warnings
import weakref
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

import stronghold
from stronghold.device import AcceleratorDevice
from stronghold.device import accelerator as accelerator_module
from stronghold.device import cuda as cuda_module
from stronghold.device.memory import HostBuffer
from tests.crossed import crossed
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
    """``busy`` is whether a copy that was issued may be under way: nobody has waited for the stream since."""

    ALL: ClassVar[list[FakeStream]] = []  # torch's streams, too, are never given back

    def __init__(self, device=None) -> None:
        self.waited: list[FakeEvent] = []
        self.busy = False
        self.ALL.append(self)
        self.cuda_stream = len(self.ALL)

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
        self.device_of: dict[str, torch.device] = {}
        self.fraction = 1.0

    def init(self) -> None:
        pass

    def current_device(self) -> int:
        return 0

    def set_device(self, device) -> None:
        self.device_of[threading.current_thread().name] = device

    @contextmanager
    def device(self, device):
        self._current.entered = True
        yield
        self._current.entered = False

    def entered(self) -> bool:
        return getattr(self._current, "entered", False)

    @contextmanager
    def stream(self, stream):
        self._current.stream = stream
        self.streams_used.add(stream)
        stream.busy = True
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
    """Of a thread without a context every call fails, as the driver's do."""

    CONTEXT = 4711

    def __init__(self, result: int) -> None:
        self.result = result
        self.unregistering = 0
        self.registered: list[int] = []
        self.unregistered = 0
        self.early = 0
        """How often memory was let go of while a copy may have been under way."""
        self.cuda: FakeCuda
        self.contexts = threading.local()

    def _has_context(self) -> bool:
        return bool(self.cuda.entered()) or bool(getattr(self.contexts, "pushed", 0))

    def cuCtxGetCurrent(self, context) -> int:
        context._obj.value = self.CONTEXT if self._has_context() else None
        return 0

    def cuCtxPushCurrent_v2(self, context) -> int:
        assert context.value == self.CONTEXT
        self.contexts.pushed = getattr(self.contexts, "pushed", 0) + 1
        return 0

    def cuCtxPopCurrent_v2(self, context) -> int:
        self.contexts.pushed -= 1
        return 0

    def cuCtxSynchronize(self) -> int:
        assert self._has_context()
        for stream in FakeStream.ALL:
            stream.busy = False
        return 0

    def cuMemHostRegister_v2(self, address, length, flags) -> int:
        assert self._has_context()
        self.registered.append(length.value)
        return self.result

    def cuMemHostUnregister(self, address) -> int:
        if not self._has_context():
            return 201  # CUDA_ERROR_INVALID_CONTEXT
        self.early += any(stream.busy for stream in self.cuda.streams_used)
        self.unregistered += not self.unregistering
        return self.unregistering


class CudaOnCpu(AcceleratorDevice):
    """The CUDA device with its buffers in ordinary memory."""

    def __init__(self) -> None:
        self.recorded: list[tuple[int, list[FakeStream]]] = []
        super().__init__(cuda_module.Cuda(torch.device("cuda", 0)))
        self.torch_device = torch.device("cpu")

    def copied(self, tensor: torch.Tensor) -> None:
        super().copied(Recording(tensor.data_ptr(), self.recorded))


class Recording:
    """Stands for a tensor of the device; a tensor on the host takes no stand-in of a stream."""

    def __init__(self, address: int, recorded: list[tuple[int, list[FakeStream]]]) -> None:
        self.streams: list[FakeStream] = []
        recorded.append((address, self.streams))

    def record_stream(self, stream: FakeStream) -> None:
        self.streams.append(stream)


@pytest.fixture
def driver(monkeypatch):
    driver = FakeDriver(result=0)
    fake = FakeCuda()
    monkeypatch.setattr(cuda_module, "torch", SimpleNamespace(**{**vars(torch), "cuda": fake}))
    monkeypatch.setattr(cuda_module.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(accelerator_module, "_warned", set())
    monkeypatch.setattr(cuda_module, "_kept", [])
    driver.cuda = fake
    yield driver
    gc.collect()  # while the stand-ins are there


@pytest.mark.parametrize(
    "settings",
    [{}, {"window": 1}, {"accumulate": 2}, {"update": "in_backward"}, {"activations": "host"}, {"activations": "keep"}],
)
def test_it_trains_as_the_cpu_does(driver, settings):
    device = CudaOnCpu()
    assert train(device, **settings) == train("cpu", **settings)
    # Copies went to the copy streams, each of which waited for the computation.
    assert device.fetches.of_torch in driver.cuda.streams_used
    assert device.gradients.of_torch in driver.cuda.streams_used
    assert any(event.recorded_on is driver.cuda.compute for event in device.fetches.of_torch.waited)
    assert any(event.recorded_on is driver.cuda.compute for event in device.gradients.of_torch.waited)
    assert any(event.recorded_on is device.fetches.of_torch for event in driver.cuda.compute.waited)


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
    weight = buffer.view(0, (8,), torch.float32)
    del buffer
    assert driver.unregistered == 0  # the user's tensor is still copied from
    del weight
    assert driver.unregistered == 1


def test_memory_is_unpinned_in_any_thread(driver):
    """The last tensor over it may go in a thread that never was near the driver, as a disk's or an update's."""
    held = [CudaOnCpu().host_buffer(4096)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert driver.unregistered == 1
    assert cuda_module._kept == []


def test_memory_that_the_driver_keeps_is_not_given_to_others(driver):
    """New memory at its address would be copied as the pages that were pinned there before."""
    driver.unregistering = 700
    buffers = [CudaOnCpu().host_buffer(4096) for _ in range(2)]
    mapped = [weakref.ref(buffer.mapped) for buffer in buffers]
    with pytest.warns(
        RuntimeWarning, match=r"could not be given back .* CUDA driver error 700.* stays taken"
    ) as caught:
        buffers.clear()
    assert len(caught) == 1
    assert {id(reference()) for reference in mapped} == {id(memory) for memory in cuda_module._kept}
    assert len(cuda_module._kept) == 2


def test_a_copy_keeps_its_memory_pinned_until_the_device_has_done_it(driver):
    device = CudaOnCpu()
    gate, target, buffer = stronghold.device.Event(), torch.zeros(4096, dtype=torch.uint8), device.host_buffer(4096)
    device.fetches.wait(gate)
    device.fetches.copy(target, buffer.flat)
    done = device.fetches.record()
    del buffer
    assert driver.unregistered == 0
    gate.happen()
    done.wait()
    wait_until(lambda: driver.unregistered == 1)  # the task goes behind its event
    assert driver.early == 0


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("activations", ["recompute", "host"])
def test_a_model_that_goes_amid_a_prefetch_leaves_nothing_to_a_copy(driver, activations):
    device, gate = CudaOnCpu(), stronghold.device.Event()
    model = stronghold.offload(Model(), window=1, device=device, activations=activations)
    optimizer = stronghold.AdamW(model.parameters())
    model(torch.ones(6, 8)).sum().backward()
    device.fetches.wait(gate)
    optimizer.step()  # the first layer is fetched from here on
    slot, registered = weakref.ref(model._stronghold.window.slots[0].flat), len(driver.registered)
    held = [model, optimizer, device]
    del model, optimizer, device
    dropping = threading.Thread(target=held.clear)  # which waits for what is under way
    dropping.start()
    dropping.join(0.3)
    assert dropping.is_alive()
    assert driver.unregistered < registered  # what the copy reads
    assert slot() is not None
    gate.happen()
    dropping.join(10)
    assert not dropping.is_alive()
    wait_until(lambda: gc.collect() >= 0 and driver.unregistered == registered)
    assert driver.early == 0
    assert slot() is None


def test_memory_of_the_device_is_known_to_the_copy_streams_when_it_is_allocated(driver):
    device = CudaOnCpu()
    model = stronghold.offload(Model(), window=2, device=device)
    copies = [device.fetches.of_torch, device.root.of_torch, device.gradients.of_torch]
    recorded = dict(device.recorded)
    engine = model._stronghold
    used = [slot.flat for slot in (*engine.window.slots, *engine.gradients.grad_offload.slots)]
    used += [tensor for unit in engine.units for tensor in unit.on_device]
    used += [unit.buffer.flat for unit in engine.units if unit.resident]  # root parameters
    assert len(used) > 4
    assert all(recorded[tensor.data_ptr()] == copies for tensor in used)
    count = len(device.recorded)
    model(torch.ones(6, 8)).sum().backward()
    assert len(device.recorded) == count  # never on the way of a step


def test_every_thread_works_on_the_models_device(driver, tmp_path):
    device = CudaOnCpu()
    model = stronghold.offload(Model(), window=1, device=device, store=tmp_path)
    optimizer = stronghold.AdamW(model.parameters())
    model(torch.ones(6, 8)).sum().backward()
    optimizer.step()
    optimizer.wait()
    threads = {f"stronghold-{name}" for name in ("fetches", "root", "gradients", "updates", "disk", "reads", "ring")}
    assert driver.cuda.device_of == dict.fromkeys(threads, torch.device("cuda", 0))


def test_a_device_that_fails_is_an_error_and_no_hang(driver, monkeypatch):
    """Events are recorded in a thread of their own: what failed there left everybody waiting."""
    device = CudaOnCpu()
    model = stronghold.offload(Model(), window=1, device=device)
    model(torch.ones(6, 8))

    def fail(event, stream) -> None:
        if stream is not driver.cuda.compute:
            raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(FakeEvent, "record", fail)
    with pytest.raises(RuntimeError, match="background copy or update failed: CUDA error: unspecified launch failure"):
        model(torch.ones(6, 8))
    event = device.gradients.record()
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        event.recorded()
    assert event.done
    assert not event.passed


def test_an_event_waits_until_it_has_been_recorded(driver):
    device = CudaOnCpu()
    gate = stronghold.device.Event()
    device.fetches.wait(gate)  # as for an update on the host
    event = device.fetches.record()
    assert not event.done
    gate.happen()
    event.wait()
    assert event.done
    assert event.of_torch.recorded_on is device.fetches.of_torch


LIMITS = [(1 << 29, 0.25, (1 << 29) - (1 << 20)), (3 << 29, 0.75, 1 << 30), (1 << 40, 1.0, 1 << 30), (1, 2**-31, 0)]


@pytest.mark.parametrize(("device", "given"), crossed(["cuda", "cuda:0"], LIMITS, together=1))
def test_what_is_free_is_within_the_processs_limit(driver, monkeypatch, device, given):
    limit, fraction, free = given
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    stronghold.device.limit_memory(device, limit)
    assert driver.cuda.fraction == fraction
    assert CudaOnCpu().free_bytes() == free


def test_memory_of_a_device_that_is_not_there_is_not_limited(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device 'cuda' needs a CUDA device"):
        stronghold.device.limit_memory("cuda", 1024)
