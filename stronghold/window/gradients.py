"""Gradients on their way down: from the device's gradient slots into the host's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from stronghold import native
from stronghold.device import Device, Event, Wait, Waits
from stronghold.errors import OffloadedModelError
from stronghold.optim import HostAdamW
from stronghold.unit import (
    ONE_REPLICA,
    Consumed,
    ConsumedGradient,
    GradMeta,
    HostGrad,
    Replicas,
    StandIns,
    Unit,
    consumed_error,
    grad_meta_of,
    gradient_of,
    latest,
    note_gradient,
    present_gradients,
    set_gradient,
    take_gradient,
)
from stronghold.window.batches import Batches
from stronghold.window.device_gradients import add_on_device, remainder_of
from stronghold.window.grad_offload import DeviceSlot, GradOffload, GradStaging
from stronghold.window.parts import Parts
from stronghold.window.shared_grad_offload import SharedGradOffload, shared_slot_bytes
from stronghold.window.since_step import SinceStep
from stronghold.window.sums import apart, fits, in_own_memory, noted, raw, squares_of


@dataclass
class Ready:
    """Gradients that a layer is to be updated with behind ``after``; ``staging`` holds them until that is done."""

    unit: Unit
    gradients: dict[int, HostGrad]
    after: Event | None = None
    staging: GradStaging | None = None

    def updated(self, done: Event | None) -> None:
        """Called with the update's event."""
        if self.staging is not None:
            assert done is not None
            self.staging.free = done


class Gradients:
    """Takes each gradient from autograd as it appears and brings it to where its layer is updated.

    While a backward pass goes on, the gradients of its layers belong to this class and ``.grad`` is None; when it has
    ended they are published, as ordinary tensors in ``.grad``: of a layer in the store on the CPU, of a resident one
    on the device. To a gradient that was there before it is added in fp32: with bf16 compute the sum's low halves lie
    beside it. The squares of every gradient are summed on the device, as it leaves, and travel with it.
    """

    def __init__(self, units: Sequence[Unit], device: Device, waits: Waits, replicas: Replicas = ONE_REPLICA) -> None:
        self.units = units
        self.replicas = replicas
        self.batches = Batches(replicas)
        self.parts = Parts()
        self.since_step = SinceStep(units)
        self.device = device
        self.waits = waits
        self.optimizer: Callable[[], HostAdamW | None] | None = None
        self.summed = self.more = False
        """Whether a step has several backward passes, whose sums in_backward updates with; whether more follow."""
        self.shared: frozenset[int] = frozenset()
        """Parameters, by id, whose gradients in_backward leaves to the step: they are not complete before."""
        self._threads = native.usable_cores()
        self.grad_offload = (SharedGradOffload if replicas.world_size > 1 else GradOffload)(units, device, waits)
        self._layer: int | None = None
        self._stream: object = None  # in which its gradients come
        self._written: set[int] = set()
        self._fresh: dict[int, Tensor] = {}
        """The gradients of the open layer, if it is resident."""
        self._shown: dict[int, tuple[Tensor, Tensor, int]] = {}
        """Of which a hook was shown a sum: the gradient, the sum, and that one's version then."""
        self._held: dict[int, dict[int, Tensor]] = {}
        self._known: dict[int, dict[int, GradMeta | None]] = {}
        self._down: Event | None = None
        self._added: Event | None = None
        self._consumed: dict[tuple[int, int], Consumed] = {}
        self._stand_ins = StandIns()
        self._done: list[tuple[int, tuple[int, ...]]] = []
        """The layers of the backward pass so far, with what had gradients: what replicas must have in common."""
        self._met = False
        """Whether the replicas have met over it."""
        self._found_inf = torch.zeros((), dtype=torch.float64, device=device.torch_device)
        device.copied(self._found_inf)  # where there are replicas, their gradients' stream works on it
        self._unseen = False
        """Whether it may be other than zero."""

    def take_found_inf(self) -> bool:
        """Whether a gradient of the backward pass was not finite, from where on no layer was updated; forgets it."""
        found_inf = not math.isfinite(self._found_inf.item())
        self._found_inf.zero_()
        self._unseen = False
        return found_inf

    def check_dropped(self) -> None:
        """Raises OffloadedModelError where gradients that have updated a layer were dropped before their step.

        Called as a pass or a step begins. Where gradients were not finite a loop may look at the norm, drop them and go
        on without the step: what was not finite is forgotten then.
        """
        if self._unseen and (optimizer := self._optimizer) is not None and self._all_dropped(optimizer):
            optimizer.wait()  # what was not updated is known then
            found_inf = self.take_found_inf()
            optimizer.settle(finite=not found_inf)
            if found_inf:
                self.since_step.clear()
        self.since_step.check()

    def _all_dropped(self, optimizer: HostAdamW) -> bool:
        trained = (
            p for unit in self.units for index, p in enumerate(unit.parameters) if optimizer.updates(unit, index)
        )
        return all(gradient_of(parameter) is None for parameter in trained)

    def open(self, layer: int) -> None:
        """Begins the backward pass of ``layer``: its ``.grad`` become the class's own."""
        unit = self.units[layer]
        if unit.gradients.fit():  # a frozen parameter is trained now
            self.grad_offload.fit()
        held, known = self._held.setdefault(layer, {}), self._known.setdefault(layer, {})
        self._written, self._fresh, self._shown = set(), {}, {}
        self._layer, self._stream = layer, self.device.current_stream
        if not (there := present_gradients(unit.parameters)):
            return
        taken = [] if self.summed else self._taken(unit, range(len(unit.parameters)))
        for index, gradient in there.items():
            if isinstance(gradient, ConsumedGradient):
                raise consumed_error()
            if index in taken:
                raise OffloadedModelError(
                    f"update='in_backward' adds to no gradient that is there already (got one on a parameter of "
                    f"{unit.name}); call optimizer.zero_grad() before backward(), or use update='deferred'"
                )
            held[index], known[index] = gradient, grad_meta_of(gradient)
            set_gradient(unit.parameters[index], None)

    def show_sum(self, parameter: nn.Parameter) -> None:
        """Has a hook of the user's see the sum with what was in ``parameter.grad`` before; one that it writes is taken.

        It is the sum as autograd has it: on the device, in the gradient's own type.
        """
        assert self._layer is not None
        index, held = parameter.__dict__["_index"], self._held[self._layer]
        if index in held and index not in self._shown and (gradient := gradient_of(parameter)) is not None:
            with torch._C.DisableTorchFunctionSubclass():
                total = torch.empty_like(gradient)
                self.device.compute_copy(total, held[index])
                set_gradient(parameter, total.add_(gradient))
                self._shown[index] = gradient, total, total._version

    def _unseen_of(self, unit: Unit, index: int, gradient: Tensor | None) -> Tensor | None:
        """Returns what autograd gave where a hook that was shown a sum, ``gradient`` now, has only looked at it."""
        if (shown := self._shown.pop(index, None)) is None:
            return gradient
        fresh, total, version = shown
        if gradient is total and total._version == version:
            return fresh
        unit.check_own()  # the other replicas have another sum
        for values in (self._held, self._known):
            values[unit.layer].pop(index, None)  # type: ignore[attr-defined, index]
        return gradient

    def take(self, parameter: nn.Parameter) -> None:
        """Takes the gradient that autograd has just put into ``parameter.grad`` of the layer that is open."""
        assert self._layer is not None
        unit = self.units[self._layer]
        index = parameter.__dict__["_index"]
        gradient = self._unseen_of(unit, index, take_gradient(parameter))
        if gradient is None:  # a function's backward gave none
            self.parts.keep(unit, index, None)
            return
        if gradient.requires_grad:
            raise OffloadedModelError(
                "backward(create_graph=True) needs gradients that stay on the device with their graph, and an "
                f"offloaded layer's ({unit.name}) go to the host; offload without the layers that need second "
                "derivatives (layers=...)"
            )
        if gradient.layout != torch.strided:
            raise OffloadedModelError(
                f"{unit.name} produced a gradient of layout {gradient.layout}, and only dense gradients travel; "
                "pass sparse=False to its embedding"
            )
        if self.parts.is_part((self._layer, index)):
            self.parts.keep(unit, index, gradient)
            return
        if unit.resident:
            if index in self._fresh:
                self._fresh[index].add_(gradient)
            else:
                self._fresh[index] = in_own_memory(gradient)
            return
        if not self._written:
            begin = self.device.stamp()
            # The copy down of the layer that used this slot before must have read it.
            self.waits.compute(self.grad_offload.slot.drained, Wait.GRADIENT_SLOT_FREE)
            # It may have had to wait for staging, which is free when the update from it is done.
            self.grad_offload.traffic.update_waits.append((begin, self.device.stamp()))
        self.grad_offload.put(unit, index, gradient, add=index in self._written)
        self._written.add(index)

    def close(self, *, failed: bool = False) -> Ready | None:
        """Ends the layer's backward pass and sends its gradients down.

        Returns those with which the layer is to be updated at once, under ``in_backward``, before another is opened:
        none where the pass has ``failed``.
        """
        layer, self._layer = self._layer, None
        self.parts.closed()
        if layer is not None and failed:
            self._lose(layer)
        if layer is not None and self._fresh:
            return self._close_resident(layer)
        if layer is None or not self._written:
            return None
        unit, indices = self.units[layer], sorted(self._written)
        taken = self._taken(unit, indices)
        optimizer = self._optimizer
        found_inf = self._found_inf if optimizer is not None and optimizer.in_backward else None
        self._unseen |= found_inf is not None
        slot = self.grad_offload.send(unit, indices, self._threads, found_inf)
        self._done.append((layer, tuple(indices)))
        if not self._held[layer].keys().isdisjoint(taken):
            self._keep(layer, slot, indices)
            return self._sums(unit, slot, taken)
        ready = self._bring_down(unit, slot, taken) if taken else None
        if len(taken) < len(indices):
            self._keep(layer, slot, [index for index in indices if index not in taken])
        return ready

    def _lose(self, layer: int) -> None:
        """Uses up, without an update, what a pass that failed has of the gradients that were to update a layer."""
        unit = self.units[layer]
        lost = self._taken(unit, sorted({*self._written, *self._fresh}))
        self._written.difference_update(lost)
        for values in (self._fresh, self._held[layer], self._known[layer]):
            for index in lost:
                values.pop(index, None)
        self._consume(unit, [index for index in lost if (layer, index) not in self._consumed])

    def _taken(self, unit: Unit, indices: Iterable[int]) -> list[int]:
        """Returns of which places the gradient is used for an update at once, rather than kept for the user."""
        optimizer = self._optimizer
        if optimizer is None or not optimizer.in_backward or self.more:
            return []
        if unit.resident and self.replicas.world_size > 1:
            return []  # the step takes the mean
        return [p for p in indices if id(unit.parameters[p]) not in self.shared and optimizer.updates(unit, p)]

    @property
    def _optimizer(self) -> HostAdamW | None:
        return self.optimizer() if self.optimizer is not None else None

    @property
    def _host_threads(self) -> int:
        """The cores for what is done beside the computation: those that an update may use."""
        return self._threads if (optimizer := self._optimizer) is None else optimizer.kernel_threads.count

    def _close_resident(self, layer: int) -> Ready | None:
        """Keeps the gradients of a resident layer on the device; returns those to update it with at once."""
        unit, held, known = self.units[layer], self._held[layer], self._known[layer]
        fresh, self._fresh = self._fresh, {}
        self.device.used_here(fresh.values(), self._stream)
        taken = {index: fresh.pop(index) for index in self._taken(unit, sorted(fresh))}
        again = {index: fresh.pop(index) for index in list(fresh) if index in held}
        held.update(fresh)
        known.update(dict.fromkeys(fresh))
        if again:
            add_on_device(self.device, unit, held, known, again, self._threads)
        if not taken:
            return None
        consumed = self._consume(unit, taken)
        remainders = {}
        if again := {index: gradient for index, gradient in taken.items() if index in held}:
            add_on_device(self.device, unit, held, known, again, self._threads)
        for index in again:
            taken[index], its = held.pop(index), known.pop(index)
            remainders[index] = its.remainder if its is not None else None
        squares: list[Tensor] = []

        def sum_up() -> None:
            squares.extend(noted(squares_of(list(taken.values()), self._threads), self._found_inf).unbind())

        self._unseen = True
        self.device.compute_now(lambda: native.in_team(sum_up))
        pairs = zip(taken.items(), squares, strict=True)
        return Ready(unit, {p: HostGrad(g, one, remainders.get(p), consumed[p]) for (p, g), one in pairs})

    def _keep(self, layer: int, slot: DeviceSlot, indices: Sequence[int]) -> None:
        unit, held, known, down = self.units[layer], self._held[layer], self._known[layer], self.device.gradients
        buffer = unit.gradients.allocate(self.device)
        blank = []
        for index in indices:
            if index not in held and unit.gradients.is_lent(index):
                unit.check_own()  # replicas have no memory in common but the one
                # The user has kept the one before.
                held[index] = torch.empty(unit.shapes[index], dtype=unit.dtypes[index], device="cpu")
                blank.append(index)
        fresh = [index for index in indices if index not in held]
        self.grad_offload.copy(unit, slot, fresh, buffer)
        for index in fresh:
            held[index] = unit.gradients.lend(index)
            known[index] = latest(unit, GradMeta(index, unit.gradients.held_squares(index)))
        again = [index for index in indices if index not in fresh]
        if again:
            self._add(unit, slot, again, blank)
        else:
            self._down = slot.drained = down.record()

    def publish(self, *, failed: bool = False) -> None:
        """Ends the backward pass: waits for all gradients and makes them the parameters' ``.grad``.

        Where Ctrl-C comes it is called again; the replicas meet once.
        """
        # The user, a clipping function or an optimizer reads them next.
        self.waits.host(self._down, Wait.GRADIENT_READ)
        self.waits.host(self._added, Wait.GRADIENT_ADDED)
        self._down = self._added = None
        if not self._met:
            self._met = True
            self.grad_offload.traffic.passes += not failed
            try:
                # What they see is there once all have brought their shares.
                self.batches.agree(self._done, self.units)
            except Exception:  # what has come are means of unlike gradients
                for gradients in (self._held, self._known, self._consumed):
                    gradients.clear()
                raise
        for layer, held in self._held.items():
            unit = self.units[layer]
            for index, gradient in held.items():
                known = self._known[layer].get(index)
                # Without an optimizer of ours nobody asks for squares, and others may compile what they do with them,
                # where one that notes what becomes of it cannot go. Those of replicas see that nobody writes them, and
                # those beside a device that copies are complete.
                noted = known is not None and (known.remainder is not None or self._optimizer is not None)
                if noted or self.replicas.world_size > 1 or unit.copies.go_on_beside:
                    note_gradient(gradient, unit, known=known)
                set_gradient(unit.parameters[index], gradient)
        for (layer, index), consumed in self._consumed.items():
            parameter = self.units[layer].parameters[index]
            set_gradient(parameter, self._stand_ins.of(parameter, consumed))
        self._held.clear()
        self._known.clear()
        self._consumed.clear()
        self._done, self._met = [], False

    def collect(self, gradients: dict[int, Tensor]) -> dict[int, HostGrad]:
        """Returns the gradients of a layer on the host, with their squares as they were gathered on the way.

        Those that the user may have written since are read once more.
        """
        collected = {}
        with torch._C.DisableTorchFunctionSubclass():
            dense = apart({index: gradient.detach().contiguous() for index, gradient in gradients.items()})
        for index, values in dense.items():
            known = grad_meta_of(gradients[index])
            if known is None:
                squares = native.squared_norms([values], threads=self._host_threads)[0]
                known = GradMeta(index, torch.tensor(squares, dtype=torch.float64, device="cpu"))
            collected[index] = HostGrad(values, known.squares, known.remainder)
        return collected

    def has_updated(self, layer: int) -> bool:
        """Whether the backward pass under way has updated parameters of ``layer``."""
        return any(number == layer for number, _ in self._consumed)

    def too_late(self, unit: Unit) -> OffloadedModelError:
        """Returns the error for a gradient of a layer that comes when its update has been."""
        return OffloadedModelError(
            f"{unit.name} runs several times in one backward pass, not all of its runs use each of its parameters, and "
            "update='in_backward' has already updated those that no other run uses, or the loss computes with its "
            "parameters outside of the layer as well (a penalty on weights); use update='deferred'"
        )

    @property
    def layer(self) -> int | None:
        """The layer whose backward pass is open."""
        return self._layer

    def _sum_of(self, unit: Unit, index: int, known: GradMeta | None) -> GradMeta:
        """Returns what will be known of a sum on the host."""
        return latest(unit, GradMeta(index, unit.gradients.held_squares(index), remainder_of(unit, index, known)))

    def _add(self, unit: Unit, slot: DeviceSlot, indices: Sequence[int], blank: Sequence[int]) -> None:
        """Adds gradients to what is held on the host; ``blank`` ones hold nothing yet, in memory of their own."""
        assert unit.layer is not None
        held, known = self._held[unit.layer], self._known[unit.layer]
        staging, arrived = self.grad_offload.stage(unit, slot, indices)
        plain = [p for p in indices if p not in blank and not fits(held[p], unit.dtypes[p])]
        if plain:
            unit.check_own()
        sums = [p for p in indices if p not in blank and p not in plain]
        known.update({p: self._sum_of(unit, p, known.get(p)) for p in sums})
        known.update(dict.fromkeys([*blank, *plain]))
        updates = self.device.updates
        # The copy into the staging buffer must be complete before the host adds from it.
        self.waits.stream(updates, slot.drained, Wait.GRADIENT_ADD)
        threads = self._host_threads
        additions = [
            native.Addition(
                target=unit.own(p, raw(held[p])),
                remainder=None if (low := known[p].remainder) is None else unit.own(p, low),  # type: ignore[union-attr]
                source=unit.own(p, arrived[p].values),
            )
            for p in sums
        ]
        targets = [unit.gradients.held_squares(index) for index in sums]

        def add_up() -> None:
            with torch._C.DisableTorchFunctionSubclass():
                found = torch.tensor(native.accumulate(additions, threads=threads), dtype=torch.float64, device="cpu")
                self.replicas.updates.sum(found)
                for index, target, squares in zip(sums, targets, found.tolist(), strict=True):
                    target.fill_(squares + 0 * arrived[index].squares.item())  # not a number once one before is none
                for index in blank:
                    held[index].copy_(arrived[index].values)
                for index in plain:
                    held[index].add_(arrived[index].values)

        with self.device.noted(updates, f"add gradients {unit.name}"):
            # Of each element the sum and what is added, and the sum's low half.
            low = sum(one.remainder.nbytes for one in additions if one.remainder is not None)
            moved = 3 * sum(unit.layout.sizes[p] for p in indices) + 2 * low
            updates.run(add_up, moved_bytes=moved)
        self._added = staging.free = updates.record()

    def _bring_down(self, unit: Unit, slot: DeviceSlot, indices: Sequence[int]) -> Ready:
        """Brings the gradients to staging, from where they update the layer."""
        consumed = self._consume(unit, indices)
        staging, arrived = self.grad_offload.stage(unit, slot, indices)
        gradients = {index: replace(arrived[index], consumed=consumed[index]) for index in indices}
        return Ready(unit, gradients, slot.drained, staging)

    def _sums(self, unit: Unit, slot: DeviceSlot, indices: Sequence[int]) -> Ready:
        """Returns gradients that are held on the host, to which those in ``slot`` are on their way."""
        assert unit.layer is not None
        held, known = self._held[unit.layer], self._known[unit.layer]
        consumed = self._consume(unit, indices)
        sums = {}
        for index in indices:
            values, its = held.pop(index), known.pop(index)
            if its is None:
                raise OffloadedModelError(
                    f"the user wrote into a gradient of {unit.name} between the backward passes of a step, of which "
                    "update='in_backward' needs the sum as it is; use update='deferred'"
                )
            sums[index] = HostGrad(values, its.squares, its.remainder, consumed[index])
        # The additions go before on the updates' own stream; what is there for the first time comes with the copy down.
        return Ready(unit, sums, slot.drained)

    def _consume(self, unit: Unit, indices: Iterable[int]) -> dict[int, Consumed]:
        """Notes, and returns by index, what an update uses up. Raises OffloadedModelError for what one has already."""
        assert unit.layer is not None
        if any((unit.layer, index) in self._consumed for index in indices):
            raise self.too_late(unit)
        consumed = {index: Consumed(unit) for index in indices}
        self._consumed.update({(unit.layer, index): one for index, one in consumed.items()})
        return consumed


def gradient_slot_bytes(unit: Unit) -> int:
    """Returns what the gradients of a layer take on the device, on their way down."""
    return shared_slot_bytes(unit) if unit.replicas.world_size > 1 else unit.gradients.layout.total_bytes
