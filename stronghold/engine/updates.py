"""How the engine takes an optimizer's step: it asks what is to be updated, and carries that out through the store."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from stronghold import native
from stronghold.device import Device, Event, Wait, Waits, check_process, forks
from stronghold.optim import HostAdamW, Update, gradients_of, settings_now, updates_of
from stronghold.store import Store, UpdateIO
from stronghold.unit import HostGrad, Replicas, Unit, grad_meta_of, sum_over, wait_for_copies

if TYPE_CHECKING:
    from stronghold.engine.engine import Engine

Found = Mapping[Unit, Mapping[int, HostGrad]]
"""Gradients where their units are updated, by index."""


def check_complete(engine: Engine) -> None:
    """Raises OffloadedModelError where a backward pass has updated layers whose step has not come, or never will."""
    engine.close_backward()
    wait_on_host(engine)
    engine.gradients.check_dropped()
    engine.gradients.since_step.check_saved()


def wait_on_host(engine: Engine) -> None:
    """Blocks until every update under way is complete, whichever of the model's optimizers has asked for it."""
    for unit in engine.units:
        unit.wait_on_host()


def take_step(engine: Engine, optimizer: HostAdamW) -> None:
    """Takes a step with the gradients at hand; their updates run on behind the return.

    Raises NonFiniteGradientError, ValueError for the optimizer's settings, OffloadedModelError where gradients that
    have updated a layer were dropped before, and what refuses an update or a state: nothing has changed then.
    """
    optimizer.check_settings()
    with engine.turns.taken():
        engine.close_backward()
        if optimizer.in_backward:
            optimizer.wait()  # the updates of the backward pass tell whether its gradients were finite
            engine.gradients.check_dropped()
            engine.gradients.since_step.check_step(optimizer.updates, settings_now(optimizer))
        given = {unit: gradients for unit in engine.units if (gradients := gradients_of(optimizer, unit))}
        wait_for_copies(u for u, its in given.items() if any(grad_meta_of(one) is None for one in its.values()))
        engine.agree(optimizer, given)
        engine.check_step(optimizer)
        found = engine.collect(given)
        norm = _norm(engine, optimizer, found)
        if not math.isfinite(norm):
            engine.gradients.since_step.clear()  # what was updated before the first such gradient stays so
        scale = optimizer.scale_for(norm)
        if scale is not None:
            _update(engine, optimizer, found, scale)
            engine.gradients.since_step.clear()
        engine.stopwatch.lap()


def update_now(
    engine: Engine, optimizer: HostAdamW, unit: Unit, gradients: dict[int, HostGrad], after: Event | None
) -> Event | None:
    """Updates one layer during the backward pass, behind ``after``.

    Returns the update's event, or None where the computation itself updates, in its order.
    """
    optimizer.check_settings(once=True)
    unit.copies.settle(held=bool(unit.aliased))
    if unit.was_written():
        unit.take_writes()
    with _all_or_given_up(engine, [unit]) as prepared:
        _prepare(engine, optimizer, {unit: gradients}, prepared, checked=True)
        # Before: where Ctrl-C comes in between, the next pass is refused, and none updates the layer twice.
        engine.gradients.since_step.note(unit, gradients, partial(settings_now, optimizer))
        done = prepared[unit].submit(1.0, after)
    if done is None and not unit.weight[0].is_cpu:
        optimizer.in_order.append(prepared[unit].update.counted)  # not the update: it would keep the gradients
    return done


def _norm(engine: Engine, optimizer: HostAdamW, found: Found) -> float:
    """Returns the norm of all gradients, here and of the model's other processes; not a number if one is not finite."""
    finite = not (optimizer.in_backward and engine.gradients.take_found_inf())
    squares = (
        float(gradient.squares)
        for unit, gradients in found.items()
        for index, gradient in gradients.items()
        if id(unit.parameters[index]) not in engine.copies
    )
    return math.sqrt(sum_over(engine.processes, sum(squares) if finite else math.nan))


def _update(engine: Engine, optimizer: HostAdamW, found: Found, scale: float) -> None:
    with _all_or_given_up(engine, found) as prepared:
        _prepare(engine, optimizer, found, prepared)
        for one in prepared.values():
            one.submit(scale)
        engine.changed(list(prepared))
        for update in (one.update for one in prepared.values()):
            if update.unit.is_aliased or _is_shared(update):
                optimizer.wait()  # what the user can read or write unseen must be done by now
                for unit in prepared:
                    unit.handed_out.check_weights(unit)
                return
            update.mark_pending()


@contextmanager
def _all_or_given_up(engine: Engine, units: Iterable[Unit]) -> Iterator[dict[Unit, PreparedUpdate]]:
    """Lends a block the place for its updates of ``units``; an error in it, such as Ctrl-C, gives up those left over.

    Those that were submitted are complete then. The window has nothing from before an update, however it ends.
    """
    prepared: dict[Unit, PreparedUpdate] = {}
    try:
        if not all(unit.resident for unit in units):
            engine.window.to_change()
        yield prepared
    except BaseException as error:
        for one in prepared.values():
            one.give_up()
        if not isinstance(error, Exception):  # Ctrl-C, and not a refusal: some may be on their way
            with suppress(Exception):  # which the next use of the unit raises again
                for unit in prepared:
                    unit.wait_on_host()
        raise


def _is_shared(update: Update) -> bool:
    """Whether the user has gradients that are updated with in other tensors than ``.grad`` as well."""
    shared = update.unit.gradients.is_shared
    return any(shared(change.index, change.gradient.of_user) for change in update.changes)


def _prepare(
    engine: Engine,
    optimizer: HostAdamW,
    found: Found,
    prepared: dict[Unit, PreparedUpdate],
    *,
    checked: bool = False,
) -> None:
    """Makes the updates of all units ready, in the order in which they are to be submitted: nothing refuses one then.

    Where one is refused, nothing has changed.
    """
    for update in updates_of(optimizer, found, checked=checked):
        one = prepared[update.unit] = engine.updates.prepare(update)
        one.begin()
    optimizer.begun(prepared[unit].update for unit in found)


class Updates:
    """Runs the optimizer's work on a unit where its states are: on the host, or of a resident layer on the device."""

    def __init__(self, device: Device, store: Store, waits: Waits, replicas: Replicas) -> None:
        self._born = forks()
        self._device, self._store, self.waits, self._replicas = device, store, waits, replicas
        self.written_back = device.host_stream("written_back") if replicas.local_world_size > 1 else None
        """Where this process waits for the updates of the machine's other replicas."""
        self.streams = [] if self.written_back is None else [self.written_back]
        """Its own."""

    def prepare(self, update: Update) -> PreparedUpdate:
        """Makes a unit's update ready, which writes nothing yet. Updates are submitted in the order of this."""
        check_process(self._born)
        return PreparedUpdate(self, update, self._store.update_io(update.unit, update.operands, update.parts))

    def run(self, update: Update, update_io: UpdateIO, after: Event | None) -> Event | None:
        """Updates a unit when ``after`` has happened. Returns when the next may use it; None for a resident layer."""
        unit = update.unit
        shared = self._replicas.local_world_size > 1 and not unit.resident

        def task() -> None:
            segments = update.segments()
            if segments is None:
                update_io.cancel()
                return
            update_io.run(segments, update.kernel)
            update.end()
            if not shared:
                update.done()

        if unit.resident:
            self._device.compute_now(lambda: native.in_team(task), update.moved_bytes)
            return None
        if unit.has_device_copy:
            after = self._bring_down(update)
        updates = self._device.updates
        # A root parameter's gradient is on its way down, and under in_backward a layer's may be.
        self.waits.stream(updates, after, Wait.GRADIENT_UPDATE)
        # A layer may have been fetched, or read ahead, for a computation that did not come.
        self.waits.stream(updates, self._store.reading(unit), Wait.FILE_READ)
        if shared and self._store.paths:
            updates.submit(self._replicas.updates.barrier)  # the others' reads of the file are complete, too
        with self._device.noted(updates, f"update {unit.name}"):
            updates.run(task, moved_bytes=update.moved_bytes)
        done = self._store.written_back(unit, updates.record())
        if shared:
            done = self._written_back_everywhere(done, update)
        return self._uploaded(unit, done)

    def give_up(self, unit: Unit, update_io: UpdateIO, *, begun: bool) -> None:
        """Gives up an update that is not in line in full; one that was ``begun`` is done behind ``unit.updated``."""
        if unit.resident:
            return
        self._device.updates.submit(update_io.cancel)  # which does nothing where it has run by then
        if begun:
            unit.updated = self._uploaded(unit, self._store.written_back(unit, self._device.updates.record()))

    def _uploaded(self, unit: Unit, done: Event) -> Event:
        """Has what an update wrote, when it is ``done``, copied to where the unit is on the device as well."""
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

    def _bring_down(self, update: Update) -> Event:
        """Has a root parameter's gradients copied down; returns the event after which they are on the host.

        They are complete, for the host has seen their squares. The user may drop them before they are copied.
        """
        unit, down = update.unit, self._device.gradients
        with self._device.noted(down, f"gradients {unit.name}"):
            for gradient in (change.gradient for change in update.changes):
                source = gradient.source
                assert source is not None
                unit.update_reads.append(source.values)
                down.copy(gradient.values, source.values)
                if gradient.remainder is not None and source.remainder is not None:
                    down.copy(gradient.remainder, source.remainder)
        return down.record()

    def _written_back_everywhere(self, done: Event, update: Update) -> Event:
        """Returns the event after which the updates of all replicas' shares of a unit are complete."""
        assert self.written_back is not None
        # Of this process's share that was said when it is complete.
        self.waits.thread(self.written_back, done, Wait.SHARE_UPDATED)
        self.written_back.submit(self._replicas.written_back.barrier)
        self.written_back.submit(update.done)
        return self.written_back.record()


class PreparedUpdate:
    """One unit's update with its reads and writes in the store, which nothing refuses any more."""

    def __init__(self, updates: Updates, update: Update, update_io: UpdateIO) -> None:
        self._updates, self.update, self._update_io = updates, update, update_io
        self._state = "prepared"

    @property
    def unit(self) -> Unit:
        return self.update.unit

    def submit(self, scale: float, after: Event | None = None) -> Event | None:
        """Gives the update to its place in line, behind ``after``; returns its event, if any.

        ``scale`` multiplies the gradients. The unit's weights are stale on the device from now on.
        """
        self.update.scale, self._state = scale, "begun"
        self.unit.supersede()
        self.unit.updated = self._updates.run(self.update, self._update_io, after)
        self._state = "submitted"
        return self.unit.updated

    def begin(self) -> None:
        """Has the store begin to read what the update needs."""
        self._update_io.begin()

    def give_up(self) -> None:
        """Gives it up where it has not been submitted, or an error came before it was in full."""
        if self._state != "submitted":
            self._updates.give_up(self.unit, self._update_io, begun=self._state == "begun")
