"""When the ring reads, beside the thread that updates, which may be at another update; and how long it is."""

import threading
import time

import torch

import stronghold
from stronghold.device import CpuDevice
from stronghold.planner.disk_play import CHUNK_BYTES, RING_SLOTS
from stronghold.store.ring import SLOT_BYTES, SLOTS, Chunk, Ring
from tests.small import Residual, numbers, ordinary_loop


def test_a_chunk_is_read_while_another_update_is_under_way(tmp_path):
    model = stronghold.offload(Residual(), device="cpu", window=1, store=tmp_path)
    optimizer = stronghold.AdamW(model.parameters(), update="in_backward")
    engine = stronghold.engine.engine_of(model)
    ring, file = engine.store._ring, engine.store._file_of(engine.layers[0])
    chunk, over = Chunk(file, object(), True, lambda: False, [], [(0, 4096, 0)]), threading.Event()
    engine.device.updates.submit(over.wait)
    try:
        ring.add([chunk])
        until_s = time.monotonic() + 20
        while not chunk.reads and time.monotonic() < until_s:
            time.sleep(0.001)
        assert chunk.reads, "it waits for the update"
        assert all(transfer.wait() for transfer in chunk.reads)
    finally:
        over.set()
        engine.device.updates.submit(lambda: ring.cancel([chunk]))
        engine.device.updates.drain()
    assert chunk.slot is None
    assert optimizer.in_backward
    stronghold.close(model)


def trained_with(store, between=lambda model: None):
    torch.manual_seed(0)
    model = stronghold.offload(Residual().eval(), device="cpu", window=1, store=store)
    optimizer = stronghold.AdamW(model.parameters(), update="in_backward")
    between(model)
    ordinary_loop(model, optimizer, numbers(3))
    optimizer.wait()
    return model


def test_slots_in_use_grow_when_they_are_free(tmp_path):
    """What an update has read stays where it is, and later updates have longer buffers and the same bits."""
    seen = []

    def grow(model):
        engine = stronghold.engine.engine_of(model)
        ring, file = engine.store._ring, engine.store._file_of(engine.layers[0])
        before, held = ring.slot_bytes, stronghold.report(model).host_bytes
        assert before == file.taken_bytes < SLOT_BYTES
        chunk = Chunk(file, object(), True, lambda: False, [], [(0, 4096, 0)])
        engine.device.updates.submit(lambda: (ring.add([chunk]), ring.take(chunk)))
        engine.device.updates.drain()
        buffer, read = chunk.slot.buffer, chunk.slot.buffer.flat[:4096].clone()
        ring.hold(before + 1)
        assert chunk.slot.buffer is buffer and torch.equal(buffer.flat[:4096], read)
        assert stronghold.report(model).host_bytes == held + (SLOTS - 1) * 4096
        engine.device.updates.submit(lambda: ring.cancel([chunk]))
        engine.device.updates.drain()
        seen.append(held + SLOTS * 4096)

    model = trained_with(tmp_path, grow)
    assert stronghold.report(model).host_bytes == seen[0]
    expected = trained_with("ram")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))
    stronghold.close(model)


def test_no_slot_is_longer_than_the_longest_there_may_be():
    ring = Ring(CpuDevice(), CpuDevice().host_stream("ring"))
    assert ring.missing_bytes(4097) == SLOTS * 8192
    ring.hold(4097)
    assert (ring.missing_bytes(8192), ring.missing_bytes(10**12)) == (0, SLOTS * (SLOT_BYTES - 8192))
    ring.hold(10)
    assert ring.slot_bytes == 8192, "it never gets shorter"


def test_the_step_model_s_ring_is_this_one():
    assert (RING_SLOTS, CHUNK_BYTES) == (SLOTS, SLOT_BYTES)
