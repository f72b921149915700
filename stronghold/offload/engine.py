"""One offloaded model: the events that its blocks, autograd and the optimizer send, and what follows from each."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from stronghold import native
from stronghold.config import OffloadSettings
from stronghold.device import Device, Event, Wait, Waits, available_host_bytes, keep_freed_memory
from stronghold.errors import BudgetError, OffloadedModelError
from stronghold.home import ONE_REPLICA, Collected, Home, OffloadedParameter, Replicas, Updater, Work
from stronghold.offload.block import Block, Members, Run
from stronghold.offload.company import Alone, Company
from stronghold.offload.hooks import Hooks
from stronghold.offload.placement import Placement
from stronghold.offload.reopening import Reopened
from stronghold.offload.timing import Stopwatch
from stronghold.offload.updates import Updates
from stronghold.store import DiskStore, RamStore, Store
from stronghold.units import format_bytes
from stronghold.weights import Source, give_values
from stronghold.window import DeviceGradients, Gradients, HostActivations, Window


class Engine:
    """One offloaded model: its homes, its window, and the events that autograd and the optimizer send."""

    def __init__(
        self,
        model: nn.Module,
        placement: Placement,
        device: Device,
        settings: OffloadSettings,
        weights: Source | Reopened,
        replicas: Replicas = ONE_REPLICA,
    ) -> None:
        self.model = weakref.ref(model)
        self.device = device
        self.replicas = replicas
        self.homes: Sequence[Home] = placement.homes
        self.layers = placement.layers
        self.micro_batch = settings.micro_batch
        self.waits = Waits(device)
        self.optimizer: weakref.ref[Updater] | None = None
        self.company: Company = Alone()
        """The processes that train the same model."""
        self.copies: frozenset[int] = frozenset()
        """The parameters, by id, that another process has as well, and answers for."""
        self.kind = type(model).__name__
        self.sums_gradients = False
        self._runs: list[weakref.ref[Run]] = []
        self._backward_open = False
        own = sum(p.numel() * p.element_size() for p in model.parameters() if p.is_cpu)
        self.process_bytes = max(0, psutil.Process().memory_info().rss - own)
        paths = [Path(path) for path in settings.directories]
        replicas.agree([os.path.realpath(path) for path in paths], here=True)
        replicas.agree([(home.name, home.resident, sorted(home.on_disk)) for home in self.homes])
        reopen = isinstance(weights, Reopened)
        self.store: Store = (
            DiskStore(device, paths, self.homes, self.waits, reopen=reopen) if paths else RamStore(device)
        )
        try:
            on_disk = sum(
                (home.layout.total_bytes if home.lives("weights") == "disk" else 0)
                + (home.remainder_bytes() if home.lives("remainders") == "disk" else 0)
                for home in self.homes
            )
            self.store.check_space(on_disk, "the model's weights")
            for home in self.homes:
                home.owner = self
            if isinstance(weights, Reopened):
                assert isinstance(self.store, DiskStore)
                weights.place(self.store, self.homes)
            else:
                for number, values in weights.units([home.parameters for home in self.homes], placement.modules):
                    self.store.place(self.homes[number], values)
        except BaseException:
            self.store.close()
            raise
        self.replicas.main.meet()  # the first one's values are there
        self.edge_bytes = placement.edge_bytes
        self.window = Window(self.layers, placement.window, device, self.store, self.waits)
        self.gradients = Gradients(self.layers, device, self.waits, replicas)
        self.device_gradients = DeviceGradients(device, self.waits)
        self.activations = HostActivations(device, self.waits) if settings.activations == "host" else None
        for home in self.homes:  # from here on nothing large is allocated but the edges, and the model changes
            self._attach(home)
        for module, name, buffer in weights.buffers():
            module._buffers[name] = buffer
        placement.move_edges(device)
        for module, name in placement.buffers:
            if (moved := module._buffers[name]) is not None:
                replicas.take_first(moved, common=False)
        self._updates = Updates(device, self.store, self.waits, replicas)
        self._hooks = Hooks(self._expect, self.gradients, self.device_gradients)
        self.stopwatch = Stopwatch(device, self.window.traffic, self.gradients.downlink.traffic, self.store.counters)
        keep = settings.activations == "keep"
        layers = zip(placement.modules, self.layers, strict=True)
        self.blocks = [Block(module, home, self, keep=keep) for module, home in layers]
        self._edges = placement.edges
        self._budgets = settings.device_memory, settings.host_memory
        within = {id(inner) for module in placement.modules for inner in module.modules()}
        for home, _ in self._edges:
            self._hooks.on_edge(home)
        self._outside = Members(type(model).__name__, (m for m in model.modules() if id(m) not in within))

    def __deepcopy__(self, memo: dict) -> None:
        """Leaves itself out: a copy of an offloaded model is an ordinary model."""

    def __reduce__(self) -> tuple[type, tuple]:
        return type(None), ()

    # What blocks say.

    def enter(self, block: Block) -> list[int]:
        if torch._C._current_graph_task_id() == -1:
            self.close_backward()
        else:
            self._close_layer()  # a checkpoint of the user's own runs its layers again
        block.check()
        self.take_writes(block.home)
        if block.layer == 0:
            self._check_edges()
        if torch.is_grad_enabled():
            self._hooks.on_layer(block.home)
        return [run.layer for run in self._alive()]

    def ran(self, run: Run) -> None:
        self._runs.append(weakref.ref(run))

    def return_to(self, run: Run) -> None:
        self._return_to(run.layer, run)

    # What autograd says.

    def _return_to(self, layer: int, run: Run | None) -> None:
        if self.gradients.layer == layer and self.window.is_bound(layer):
            return
        if torch._C._current_graph_task_id() == -1:
            raise OffloadedModelError(
                f"what autograd saved for {self.layers[layer].name} was asked for outside a backward pass, where no "
                "layer is on the device; read it in the backward pass, or have the layer recomputed"
            )
        home = self.layers[layer]
        if run is not None and (home.generation != run.generation or home.versions_now() != home.versions):
            raise OffloadedModelError(
                f"the weights of {home.name} must be the same in the backward pass as in its forward pass (they have "
                "been updated or written in between); call backward() before step(), or run the forward pass again"
            )
        self._close_layer()
        if not self._backward_open:
            self._backward_open = True
            torch.autograd.Variable._execution_engine.queue_callback(self.close_backward)
        alive = self._alive()
        numbers = [i for i, other in enumerate(alive) if (other is run if run else other.layer == layer)]
        before = alive[: numbers[-1]] if numbers else alive
        self._runs = [weakref.ref(other) for other in before]
        self.window.begin_backward(layer, [other.layer for other in reversed(before)])
        self.gradients.open(layer)

    def _expect(self, home: Home, gradient: Tensor) -> None:
        # A layer that needs nothing of its weights in the backward pass (an addition) first shows by its gradient. It
        # is opened before autograd adds this gradient to one that the user keeps on the host.
        assert home.index is not None
        if self.gradients.layer != home.index or not self.window.is_bound(home.index):
            self._return_to(home.index, None)

    def _close_layer(self) -> None:
        layer = self.gradients.layer
        if layer is None:
            return
        self.window.computed(layer, backward=True)
        updated = self.gradients.close()
        self.window.end_backward(layer)
        if updated is not None:
            self.window.changed([layer])

    def close_backward(self) -> None:
        """Ends a backward pass: its last layer, and the gradients that the user now sees."""
        self._close_layer()
        if self._backward_open:
            self._backward_open = False
            self.gradients.publish()
        self.device_gradients.close()

    def begin_pass(self, number: int, passes: int) -> None:
        """Hears that backward pass ``number`` (from 0) of the ``passes`` of a step begins, in a part of the model."""
        self.gradients.summed, self.gradients.more = passes > 1, number < passes - 1

    # What the optimizer and the parameters say.

    def adopt(self, optimizer: Updater) -> None:
        known = self.optimizer() if self.optimizer is not None else None
        if known is not None and (known.in_backward or optimizer.in_backward):
            raise OffloadedModelError(
                "update='in_backward' needs the model's only optimizer, because the backward pass itself updates (got "
                "a second one); delete the first, or use update='deferred'"
            )
        self.optimizer = self.gradients.updater = weakref.ref(optimizer)
        if self.device.is_host and not self.store.paths and not optimizer.in_backward:
            keep_freed_memory(optimizer)  # the others are there to take little memory, not to be fast

    def agree(self, found: Mapping[Home, Collection[int]]) -> None:
        if self.replicas.total > 1:
            self.replicas.agree([(home.name, tuple(places)) for home, places in found.items()])

    def collect(self, home: Home, gradients: dict[int, Tensor]) -> dict[int, Collected]:
        if home.is_edge or home.resident:
            return self.device_gradients.collect(home, gradients)
        return self.gradients.collect(gradients)

    def take_writes(self, home: Home) -> bool:
        if not home.was_written():
            return False
        home.wait_updated()
        if not home.mirrored:
            self.changed([home])
            home.take_writes()
            return True
        arrived = [torch.empty_like(weight) for weight in home.weight]
        for value, there in zip(arrived, home.on_device, strict=True):
            self.device.compute_copy(value, there)
        # The host is to compare its weight with what was written on the device.
        self.waits.host(self.device.compute_mark(), Wait.EDGE_WRITTEN)
        home.take_writes(arrived)
        return True

    def update(self, home: Home, work: Work, moved_bytes: int, after: Event | None) -> Event | None:
        return self._updates.run(home, work, moved_bytes, after)

    def update_threads(self) -> int:
        # A GPU idles where the thread that launches its kernels does not get a core; where the CPU computes, both share
        # all cores and the longer work gets what the other leaves.
        cores = max(1, native.usable_cores() // self.company.neighbours)
        return cores if self.device.torch_device.type == "cpu" else max(1, cores - 1)

    def sum_squares(self, found: Mapping[Home, Mapping[int, Collected]], *, finite: bool) -> float:
        squares = (
            float(gradient.squares)
            for home, gradients in found.items()
            for place, gradient in gradients.items()
            if id(home.parameters[place]) not in self.copies
        )
        return self.company.sum(sum(squares) if finite else math.nan)

    def take_poison(self) -> bool:
        return self.gradients.take_poison()

    def check_memory(self, *, host_bytes: int, device_bytes: int, disk_bytes: int = 0, what: str) -> None:
        self.store.check_space(disk_bytes, what)
        device_memory, host_memory = self._budgets
        held_on_host, share = self.device.pinned_bytes + self.device.pageable_bytes, host_bytes // self.replicas.count
        for name, budget, held, more in (
            ("device_memory", device_memory, self.device_bytes(), device_bytes),
            ("host_memory", host_memory, held_on_host, share),
        ):
            if isinstance(budget, int) and held + more > budget:
                raise BudgetError(
                    f"{what} takes {format_bytes(more)} beside {format_bytes(held)} that are held already (got "
                    f"{name}={format_bytes(budget)}); raise {name}, freeze parameters, or see states='8bit' and "
                    "update='in_backward'"
                )
        if host_bytes > (available := available_host_bytes()):
            raise MemoryError(
                f"{what} takes {format_bytes(host_bytes)} of host memory, and the system has {format_bytes(available)} "
                "left; use states='8bit' or update='in_backward', freeze parameters, or train a smaller model"
            )

    def device_bytes(self) -> int:
        """Returns what is held on the device between steps."""
        slots = sum(slot.flat.numel() for slot in self.window.slots)
        return slots + self.gradients.downlink.device_bytes + self.edge_bytes + self.resident_bytes()

    def resident_bytes(self) -> int:
        """Returns what resident layers hold on the device, their gradients and states included."""
        gradients = sum(home.gradients.layout.total_bytes for home in self.layers if home.resident)
        return gradients + self.device.resident_bytes

    def changed(self, homes: Sequence[Home]) -> None:
        self.window.changed([home.index for home in homes if home.index is not None])

    def step_done(self) -> None:
        self.stopwatch.lap()

    def wait_updates(self) -> None:
        begin = self.device.stamp()
        for home in self.homes:
            if home.updated is not None:
                home.updated.wait()  # for the host's sake: somebody is to read or write what the update writes
        self.window.traffic.update_waits.append((begin, self.device.stamp()))

    def wait_updated(self, home: Home) -> None:
        event, begin = home.updated, self.device.stamp()
        if home.mirrored:
            # The upload of the edge's new value must have arrived before anything computes with it.
            self.waits.compute(event, Wait.EDGE_UPLOADED)
        else:
            self.waits.host(event, Wait.WEIGHTS_READ)
        self.window.traffic.update_waits.append((begin, self.device.stamp()))
        home.updated = None

    # Its own.

    def _alive(self) -> list[Run]:
        return [run for reference in self._runs if (run := reference()) is not None]

    def _attach(self, home: Home) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for place, (parameter, weight) in enumerate(zip(home.parameters, home.weight, strict=True)):
                give_values(parameter, weight)
                parameter.__class__ = OffloadedParameter
                parameter.__dict__.update(_home=home, _place=place)
                home.attach(place)

    def _check_edges(self) -> None:
        for home, owners in self._edges:
            self._hooks.on_edge(home)
            home.check_unchanged((module, name, home.parameters[0]) for module, name in owners)
        self._outside.check()
