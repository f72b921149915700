"""An update on its way: what it waits for, and from when on others see it."""

from __future__ import annotations

from stronghold.device import Device, Event, Wait, Waits
from stronghold.store import Store, UpdateIO
from stronghold.unit import Replicas, Unit, Work


class Updates:
    """Runs the optimizer's work on a unit where its states are: on the host, or of a resident layer on the device."""

    def __init__(self, device: Device, store: Store, waits: Waits, replicas: Replicas) -> None:
        self._device, self._store, self.waits, self._replicas = device, store, waits, replicas
        self.written_back = device.host_stream("written_back") if replicas.local_world_size > 1 else None
        """Where this process waits for the updates of the machine's other replicas."""

    def prepare(self, unit: Unit, work: Work, moved_bytes: int) -> PreparedUpdate:
        """Makes a unit's update ready, which writes nothing yet."""
        update_io = self._store.update_io(unit, work.operands, work.parts)
        return PreparedUpdate(self, unit, work, moved_bytes, update_io)

    def run(self, unit: Unit, work: Work, moved_bytes: int, update_io: UpdateIO, after: Event | None) -> Event | None:
        """Updates a unit when ``after`` has happened. Returns when the next may use it; None for a resident layer."""
        shared = self._replicas.local_world_size > 1 and not unit.resident

        def task() -> None:
            segments = work.segments()
            if segments is None:
                update_io.cancel()
                return
            update_io.run(segments, work.kernel)
            if not shared:
                work.done()

        if unit.resident:
            self._device.compute_now(task, moved_bytes)
            return None
        updates = self._device.updates
        # Under in_backward the gradient may still be on its way down.
        self.waits.stream(updates, after, Wait.GRADIENT_UPDATE)
        # A layer may have been fetched, or read ahead, for a computation that did not come.
        self.waits.stream(updates, self._store.reading(unit), Wait.FILE_READ)
        if shared and self._store.paths:
            updates.submit(self._replicas.updates.barrier)  # the others' reads of the file are complete, too
        with self._device.noted(updates, f"update {unit.name}"):
            updates.run(task, moved_bytes=moved_bytes)
        done = self._store.written_back(unit, updates.record())
        if shared:
            done = self._written_back_everywhere(done, work)
        if not unit.has_device_copy:
            return done
        root = self._device.root
        # The upload carries what the update wrote. That nobody computes with the old value any more, the host knows
        # since it waited for the root parameter's gradient.
        self.waits.stream(root, done, Wait.ROOT_UPDATED)
        with self._device.noted(root, f"upload {unit.name}"):
            for target, weight in zip(unit.on_device, unit.weight, strict=True):
                root.copy(target, weight)
        return root.record()

    def _written_back_everywhere(self, done: Event, work: Work) -> Event:
        """Returns the event after which the updates of all replicas' shares of a unit are complete."""
        assert self.written_back is not None
        # Of this process's share that was said when it is complete.
        self.waits.thread(self.written_back, done, Wait.SHARE_UPDATED)
        self.written_back.submit(self._replicas.written_back.barrier)
        self.written_back.submit(work.done)
        return self.written_back.record()


class PreparedUpdate:
    """One unit's update with its reads and writes in the store, which nothing refuses any more."""

    def __init__(self, updates: Updates, unit: Unit, work: Work, moved_bytes: int, update_io: UpdateIO) -> None:
        self._updates, self._unit, self._work, self._moved_bytes = updates, unit, work, moved_bytes
        self._update_io = update_io

    def submit(self, after: Event | None) -> Event | None:
        return self._updates.run(self._unit, self._work, self._moved_bytes, self._update_io, after)

    def cancel(self) -> None:
        self._update_io.cancel()
