"""When the ring reads: beside the thread that updates, which may be at another update."""

import threading
import time

import stronghold
from stronghold.store.ring import Chunk
from tests.small import Residual


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
