"""Gradients that stay on the device: those of root parameters and of resident layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from stronghold import native
from stronghold.device import Device, Wait, Waits
from stronghold.split import join, split
from stronghold.unit import (
    GradMeta,
    HostGrad,
    Unit,
    grad_meta_of,
    gradient_of,
    has_company,
    latest,
    note_gradient,
    set_gradient,
    unit_of,
)
from stronghold.window.sums import add, apart, in_own_memory, squares_of, write_squares


class DeviceGradients:
    """Adds up the root's gradients in fp32, where autograd would in bf16, and hands gradients to the optimizer.

    The gradient of one with a device copy is copied down by its update; others are used where they are. Where there are
    replicas each has its own until it is collected, and all have the mean from then on.
    """

    def __init__(self, device: Device, waits: Waits) -> None:
        self.device = device
        self.waits = waits
        self._threads = native.usable_cores()
        self._held: dict[tuple[Unit, int], Tensor] = {}
        self._added_to: set[tuple[Unit, int]] = set()
        """Gradients that were there when autograd came with more: their memory is whose it is."""

    def expect(self, unit: Unit, index: int, gradient: Tensor | None) -> None:
        """Called before autograd adds to a root parameter's gradient: the one that is there is kept out of the way.

        In fp32 autograd's own sum is exact enough, and it stays.
        """
        parameter = unit.parameters[index]
        with torch._C.DisableTorchFunctionSubclass():
            before = gradient_of(parameter)
            (self._added_to.discard if before is None else self._added_to.add)((unit, index))
            if before is None or gradient is None or gradient.requires_grad or unit.dtypes[index] == torch.float32:
                return
            if {before.layout, gradient.layout} != {torch.strided}:
                return
            self._held[unit, index] = before
            set_gradient(parameter, None)

    def take(self, parameter: nn.Parameter) -> None:
        """Adds the gradient that autograd has just put into ``parameter.grad`` to the one that was there before.

        A first one gets memory of its own, if autograd gave it some that others have too, and would add to all of them.
        """
        unit = unit_of(parameter)
        assert unit is not None
        index = parameter.__dict__["_index"]
        before = self._held.pop((unit, index), None)
        is_first = (unit, index) not in self._added_to
        self._added_to.discard((unit, index))
        with torch._C.DisableTorchFunctionSubclass():
            gradient = gradient_of(parameter)
            if gradient is None:  # a function's backward gave none
                return
            if before is None:
                if is_first and gradient.layout == torch.strided and has_company(gradient):
                    set_gradient(parameter, gradient := in_own_memory(gradient))
                if unit.replicas.world_size > 1:  # it sees that nobody writes it
                    note_gradient(gradient, unit)
                return
            set_gradient(parameter, before)  # whatever happens, what was there stays
            known = {index: grad_meta_of(before)}
            add_on_device(self.device, unit, {index: before}, known, {index: gradient}, self._threads)
            if (of_sum := known[index]) is not None or unit.replicas.world_size > 1:
                note_gradient(before, unit, known=of_sum)

    def close(self) -> None:
        """Gives back what a backward pass that failed has left."""
        for (unit, index), before in self._held.items():
            set_gradient(unit.parameters[index], before)
        self._held.clear()

    def collect(self, given: Mapping[Unit, Mapping[int, Tensor]]) -> dict[Unit, dict[int, HostGrad]]:
        """Returns gradients of root parameters and resident layers, complete, with their squares on the host.

        The host waits once for all of them.
        """
        if not given:
            return {}
        known: dict[tuple[Unit, int], GradMeta | None] = {}
        values: dict[tuple[Unit, int], Tensor] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for unit, gradients in given.items():
                unit.wait_updated()  # an update under way reads the gradient that is replaced here
                unit.gradients.fit()
                dense = apart({index: gradient.detach().contiguous() for index, gradient in gradients.items()})
                for index, gradient in gradients.items():
                    found = grad_meta_of(gradient)
                    if unit.replicas.world_size > 1:
                        found = self._mean(unit, index, dense[index], found)
                        if gradient.data_ptr() != dense[index].data_ptr():
                            gradient.copy_(dense[index])
                        note_gradient(gradient, unit, known=found)
                    known[unit, index], values[unit, index] = found, dense[index]
            squares = torch.stack(self._squares(values, known))
            arrived = torch.zeros(len(values), dtype=torch.float64, device="cpu")
            self.device.compute_copy(arrived, squares)  # all at once: on a GPU each copy is a wait
            collected: dict[Unit, dict[int, HostGrad]] = {unit: {} for unit in given}
            for ((unit, index), found), there in zip(known.items(), arrived, strict=True):
                its = HostGrad(values[unit, index], there, found.remainder if found else None)
                collected[unit][index] = self._collected(unit, index, its)
        # The copy runs behind the backward pass on the same stream; the host reads what it brings.
        self.waits.host(self.device.record_event(), Wait.ROOT_GRADIENT)
        return collected

    def _mean(self, unit: Unit, index: int, values: Tensor, known: GradMeta | None) -> GradMeta | None:
        """Makes a gradient the mean of all replicas', in place; returns what is known of that."""
        lane = unit.replicas.main
        if known is None or known.remainder is None:
            self.device.compute_now(lambda: lane.mean(values))
            return None
        remainder = known.remainder

        def mean() -> None:
            total = join(values, remainder)
            lane.mean(total)
            split(total, values, remainder)

        self.device.compute_now(mean)
        squares = torch.zeros((), dtype=torch.float64, device=values.device)

        def square() -> None:
            write_squares([join(values, remainder)], [squares], self._threads)

        self.device.compute_now(lambda: native.in_team(square))
        return latest(unit, GradMeta(index, squares, remainder))

    def _squares(
        self, values: Mapping[tuple[Unit, int], Tensor], known: Mapping[tuple[Unit, int], GradMeta | None]
    ) -> list[Tensor]:
        """Returns the sum of squares of each gradient; those that nobody knows are read, all at once."""
        sums = {key: one.squares for key, one in known.items() if one is not None}
        unknown = [key for key in values if key not in sums]
        if unknown:
            gradients, squares = [values[key] for key in unknown], list[Tensor]()

            def sum_up() -> None:
                squares.extend(squares_of(gradients, self._threads).unbind())

            self.device.compute_now(lambda: native.in_team(sum_up))
            sums.update(zip(unknown, squares, strict=True))
        return [sums[key] for key in values]

    def _collected(self, unit: Unit, index: int, gradient: HostGrad) -> HostGrad:
        if not unit.has_device_copy:
            return gradient
        return HostGrad(
            unit.gradients.view(unit.gradients.allocate(self.device), index),
            gradient.squares,
            unit.gradients.host_remainder(index) if gradient.remainder is not None else None,
            source=gradient,
        )


def add_on_device(
    device: Device,
    unit: Unit,
    held: Mapping[int, Tensor],
    known: dict[int, GradMeta | None],
    gradients: Mapping[int, Tensor],
    threads: int,
) -> None:
    """Adds ``gradients``, by index, to what is ``held`` there; ``known`` becomes what is known of the sums."""
    with torch._C.DisableTorchFunctionSubclass():
        indices = [p for p in gradients if held[p].is_contiguous() and held[p].dtype == unit.dtypes[p]]
        plain = [p for p in gradients if p not in indices]  # the user's own
        sums = [held[p] for p in indices]
        remainders = [remainder_of(unit, p, known[p]) for p in indices]
        squares: list[Tensor] = []

        def add_up() -> None:
            if sums:
                new = [gradients[p].contiguous() for p in indices]
                squares.extend(add(sums, remainders, new, threads).unbind())
            for p in plain:
                held[p].add_(gradients[p])

        device.compute_now(add_up)
        known.update(dict.fromkeys(plain))
        for index, one, remainder in zip(indices, squares, remainders, strict=True):
            known[index] = latest(unit, GradMeta(index, one, remainder))


def remainder_of(unit: Unit, index: int, known: GradMeta | None) -> Tensor | None:
    """Returns where the low halves of a sum lie, which are zero for a first gradient."""
    if known is not None and known.remainder is not None:
        return known.remainder
    if unit.dtypes[index] == torch.float32:
        return None
    unit.gradients.fit()
    remainder = unit.gradients.remainder(index)
    if remainder is not None:
        (remainder if unit.is_root else unit.own(index, remainder)).zero_()
    return remainder
