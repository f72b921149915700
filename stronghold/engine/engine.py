"""One offloaded model: the events that its blocks, autograd and the optimizer send, and what follows from each."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from stronghold import native
from stronghold.device import Device, Wait, Waits, check_process, forks
from stronghold.engine.agreeing import agree_on_step
from stronghold.engine.averaged import check_not_averaged
from stronghold.engine.block import Block
from stronghold.engine.checkpointed import SecondRuns
from stronghold.engine.closing import end_with
from stronghold.engine.compiled import Compiling
from stronghold.engine.held_memory import HeldMemory
from stronghold.engine.hooks import Hooks
from stronghold.engine.members import refuse_changes
from stronghold.engine.optimizers import Optimizers
from stronghold.engine.packing import Run, no_run
from stronghold.engine.placement import Placement, copy_to_device
from stronghold.engine.reopening import Reopened
from stronghold.engine.root import Root
from stronghold.engine.stale import check_same
from stronghold.engine.taking_in import Additions, take_in_additions
from stronghold.engine.timing import Stopwatch
from stronghold.engine.turns import Turns
from stronghold.engine.updates import Updates, update_now
from stronghold.errors import OffloadedModelError
from stronghold.formats.built_buffers import BuiltBuffers
from stronghold.optim import HostAdamW, Threads
from stronghold.planned import PlannedSteps
from stronghold.settings import OffloadSettings, kept_layers
from stronghold.store import Budget, DiskStore, RamStore, Store
from stronghold.unit import (
    ONE_PROCESS,
    ONE_REPLICA,
    HostGrad,
    OffloadedParameter,
    ProcessGroup,
    Replicas,
    Unit,
    become,
    close_parameter,
    closed_error,
    opaque,
    settle,
)
from stronghold.weights import Source, give_values
from stronghold.window import Accumulators, DeviceGradients, Gradients, Window, activations_of


class Engine:
    """One offloaded model: its units, its window, and the events that autograd and the optimizer send."""

    def __init__(
        self,
        model: nn.Module,
        placement: Placement,
        device: Device,
        settings: OffloadSettings,
        weights: Source | Reopened,
        replicas: Replicas = ONE_REPLICA,
        *,
        planned: PlannedSteps | None = None,
        own_device: bool = True,
    ) -> None:
        self.closed = False
        self.model = weakref.ref(model)
        self.device, self.replicas = device, replicas
        self.units, self.layers = placement.units, placement.layers
        self.micro_batch = settings.micro_batch_samples
        self.waits, self.optimizers = Waits(device), Optimizers()
        self.processes: ProcessGroup = ONE_PROCESS
        """Those that train the same model."""
        self._processes_here = 1
        self.copies: frozenset[int] = frozenset()
        """The parameters, by id, that another process has as well, and answers for."""
        self.whole_names: Mapping[int, str] = {}
        """The name in the whole model of a parameter, by id, that another process has by another name."""
        self.check_step: Callable[[HostAdamW], None] = lambda _: None
        self.kind = type(model).__name__
        self.sums_gradients = False
        """Whether a step has several backward passes, under in_backward too: the sums need memory."""
        self._masters_told = False
        """Whether it is known that state dictionaries have no masters: they are kept beside, or the user was told."""
        self.turns, self.second_runs = Turns(), SecondRuns()
        self._runs: list[weakref.ref[Run]] = []
        self._opened_for: Callable[[], Run | None] = no_run
        """The run whose weights the backward pass has asked for in the layer that is open."""
        self._born, self._backward_open = forks(), False
        self.compiling = Compiling(self.kind, settings.compile, settings.activations)
        self.held = HeldMemory(model, device, self.units, placement.root_bytes)
        self.budget = Budget(settings, self.held.held_bytes, processes=replicas.local_world_size)
        self.built = BuiltBuffers(model)
        self.store = self._placed(placement, settings, weights)
        self.gradients = Gradients(self.layers, device, self.waits, replicas)
        self.device_gradients = DeviceGradients(device, self.waits)
        self.open_window(placement.window, planned or PlannedSteps())
        self.activations = activations_of(settings.activations, self.window)
        self.updates = Updates(device, self.store, self.waits, replicas)
        self._hooks = Hooks(self._expect, self.gradients, self.device_gradients)
        self._take_over(model, placement, weights, kept=kept_layers(settings.activations, len(self.layers)))
        self._end = end_with(self, own=own_device)

    def open_window(self, window: int, planned: PlannedSteps) -> None:
        """Makes a window of so many slots, beside what is resident now, as it was ``planned``."""
        self.window, self.planned = Window(self.layers, window, self.device, self.store, self.waits), planned
        self.held.on_device(self.window, self.gradients)
        moved = self.window.traffic, self.gradients.grad_offload.traffic
        self.stopwatch = Stopwatch(self.waits, *moved, self.store.counters)

    def _placed(self, placement: Placement, settings: OffloadSettings, weights: Source | Reopened) -> Store:
        """Returns the store with all units in it, each with its values."""
        paths = [Path(path) for path in settings.directories]
        self.replicas.agree([os.path.realpath(path) for path in paths], here=True)
        self.replicas.agree([(unit.name, unit.resident, sorted(unit.on_disk)) for unit in self.units])
        reopen = isinstance(weights, Reopened)
        store: Store = (
            DiskStore(self.device, paths, self.units, self.waits, self.budget, reopen=reopen)
            if paths
            else RamStore(self.device, self.budget)
        )
        try:
            store.check_place(self.units)
            for unit in self.units:
                unit.belong_to(self, self.waits, self.close_backward, self.turns.taken)
            if isinstance(weights, Reopened):
                assert isinstance(store, DiskStore)
                weights.place(store, self.units, self.built)
            else:
                for number, values in weights.units([unit.parameters for unit in self.units], placement.modules):
                    store.place(self.units[number], values)
                    native.return_free_memory()  # what was read and quantised; else it adds up, unit by unit
        except BaseException:
            store.close()
            raise
        self.replicas.main.barrier()  # the first one's values are there
        return store

    def _take_over(self, model: nn.Module, placement: Placement, weights: Source | Reopened, *, kept: int) -> None:
        """Changes the model: nothing large is allocated any more but the root."""
        for unit in self.units:
            self._attach(unit)
        for module, name, buffer in weights.buffers():
            module._buffers[name] = buffer
        placement.move_root(self.device)
        settle(model, self.device.torch_device)
        for module, name in placement.buffers:
            if (moved := module._buffers[name]) is not None:
                self.replicas.take_first(moved, common=False)
        # Weakly, as all that is the user's: a layer holds its block, and that holds the engine.
        beside, again = placement.beside, len(self.layers) - kept
        self._blocks = [
            weakref.ref(Block(module, unit, self, keep=i >= again, beside=[beside[i]] if i in beside else []))
            for i, (module, unit) in enumerate(zip(placement.modules, self.layers, strict=True))
        ]
        self._root = Root(self._hooks, self.units)
        self._root.add(placement.root)
        self._root.find_versions()
        self._root.look_at(model, placement.modules)

    def __deepcopy__(self, memo: dict) -> None:
        """Leaves itself out: a copy of an offloaded model is an ordinary model."""

    def __reduce__(self) -> tuple[type, tuple]:
        return type(None), ()

    @property
    def blocks(self) -> list[Block]:
        """The layers' blocks, as long as there are layers."""
        return [block for reference in self._blocks if (block := reference()) is not None]

    @property
    def own_optimizer(self) -> HostAdamW | None:
        """The optimizer of stronghold's that updates this model, the newest of several, if there is one."""
        return self.optimizers.newest()

    def check_open(self) -> None:
        """Raises OffloadedModelError where the model was closed."""
        if self.closed:
            raise closed_error()

    def release(self) -> None:
        """Ends the threads and gives back memory, locks and files; nothing of the engine can be used after it."""
        self.closed = True
        self._end()  # a layer may still be on its way, from memory or disk
        self.optimizers.forget()
        for unit in self.units:
            for parameter in unit.parameters:
                close_parameter(parameter)
            unit.close()
        self.units = self.layers = []
        self.activations = None
        del self.window, self.gradients, self.device_gradients, self._hooks, self.updates, self.stopwatch, self.store
        del self.held

    def join(
        self,
        processes: ProcessGroup,
        *,
        shared: Mapping[nn.Parameter, str],
        copies: Iterable[nn.Parameter],
        model: str,
        passes: int,
        here: int,
        check_step: Callable[[HostAdamW], None] | None = None,
    ) -> None:
        """Makes this model a part of the ``model`` that ``processes`` train, of which so many are ``here``.

        The global norm is that of all gradients there, and checkpoints are of the whole. ``shared`` are the parameters
        that other processes have too, by their names in the whole, and ``copies`` those of them that a process before
        this one has: it counts and saves them. A step has ``passes`` backward passes; ``check_step`` may refuse it.
        """
        self.processes, self._processes_here, self.check_step = processes, here, check_step or self.check_step
        self.kind, self.sums_gradients = model, passes > 1
        self.copies = frozenset(map(id, copies))
        self.whole_names = {id(parameter): name for parameter, name in shared.items()}
        self.gradients.shared = frozenset(self.whole_names)

    def keep_masters(self, kept: bool) -> None:
        """Called when what state dictionaries lack will be kept beside them from now on, or no longer."""
        self._masters_told = kept

    def loses_masters(self) -> bool:
        """Whether a state dictionary lacks what nobody keeps; asked once, for the user is told then."""
        lost = not self._masters_told and any(unit.masters for unit in self.units)
        self._masters_told |= lost
        return lost

    # What blocks say.

    def enter(self, block: Block) -> list[int]:
        self.check_open()
        if torch.is_grad_enabled() or not block.unit.resident:  # a child has neither streams nor slots
            check_process(self._born)
        if torch._C._current_graph_task_id() == -1:
            self.close_backward()
            self.gradients.check_dropped()
        else:
            self._close_layer()  # a checkpoint of the user's own runs its layers again
        block.check()
        self.stopwatch.come_back(block.module)
        self.take_writes(block.unit)
        if block.layer == 0 and not self._root.same():
            self.refuse_changes()
        if torch.is_grad_enabled():
            check_not_averaged(block.unit, self.units)
            self._hooks.on_layer(block.unit)
            if not block.is_kept_by_itself:  # there it may be autograd that holds weights
                block.unit.will_run()
        return [run.layer for run in self._alive()]

    def ran(self, run: Run, accumulators: Accumulators[Run]) -> None:
        self._runs.append(weakref.ref(run))
        self.layers[run.layer].computed_with.runs.add(run)
        self.gradients.parts.ran(run.layer, accumulators)

    def updates_in_backward(self) -> bool:
        return (optimizer := self.own_optimizer) is not None and optimizer.in_backward

    def return_to(self, run: Run) -> None:
        self.check_open()  # most often the layer is open: it has a dozen saved tensors
        if not (self.gradients.layer == run.layer and self._opened_for() is run and self.turns.own_pass):
            self._return_to(run.layer, run)

    def put_back(self) -> None:
        """Puts the model's parameters in the place of those that a loader has made: their values are to be loaded."""
        for members in (self._root.outside, *(block.members for block in self.blocks)):
            members.put_back()

    def refuse_changes(self) -> None:
        """Takes in what was added to the model, and raises OffloadedModelError for any other change of it."""
        if not take_in_additions(self):
            refuse_changes([self._root.outside, *(block.members for block in self.blocks)])

    def take_in(self, model: nn.Module, added: Additions) -> None:
        """Takes in units of the root that were added to the model, which have been placed in the store."""
        for unit in added.units:
            self._attach(unit)
            if unit.has_device_copy:
                copy_to_device(unit, self.device)
        for module, name in added.buffers:
            module._buffers[name] = module._buffers[name].to(self.device.torch_device)  # type: ignore[union-attr]
        self.built.add(model)
        self.held.root_bytes = added.root_bytes
        self.units[:] = added.in_order([*self.units, *added.units])
        self._root.add(added.root)
        self._root.look_at(model, [block.module for block in self.blocks])
        for block in self.blocks:
            block.take_in(added.beside.get(block.layer))

    # What autograd says.

    def begin_backward(self) -> None:
        """Notes that a backward pass has begun, at whose end the user sees the gradients.

        A reentrant ``torch.utils.checkpoint`` inside a layer has a backward pass of its own within that one.
        """
        self.check_open()
        with self.turns.taken_in_backward():
            if not self.turns.in_backward:
                self._end_backward(failed=True)  # a pass before
                self.gradients.check_dropped()
                self.turns.begin(self._end_backward)
                self.stopwatch.resume()  # a second pass through a graph that is kept
            self._backward_open = True

    def _return_to(self, layer: int, run: Run | None) -> None:
        check_process(self._born)
        with self.turns.taken_in_backward():
            if self.gradients.layer != layer or not self.window.is_bound(layer):
                self._open(layer, run)
            elif run is not None and self._opened_for() is not run:  # a gradient of it may have come first
                self._begin_run(run)

    def _open(self, layer: int, run: Run | None) -> None:
        if torch._C._current_graph_task_id() == -1:
            raise OffloadedModelError(
                f"what autograd saved for {self.layers[layer].name} was asked for outside a backward pass, where no "
                "layer is on the device; read it in the backward pass, or have the layer recomputed"
            )
        unit = self.layers[layer]
        if self.window.is_bound(layer):
            raise OffloadedModelError(
                f"a layer cannot have a backward pass within its own forward pass (got one of {unit.name}), for the "
                "window moves on by whole passes; use activations='keep' if no weight is in it, or layers= without it"
            )
        self._opened_for = no_run
        if run is not None:
            self._begin_run(run)
        self._close_layer()
        self.begin_backward()
        if run is None:  # a loss on the weights themselves: no forward pass has taken in what was written
            self.take_writes(unit)
        alive = self._alive()
        numbers = [i for i, other in enumerate(alive) if (other is run if run else other.layer == layer)]
        before = alive[: numbers[-1]] if numbers else alive
        self._runs = [weakref.ref(other) for other in before]
        self.window.begin_backward(layer, [other.layer for other in reversed(before)])
        self.gradients.open(layer)
        self.gradients.parts.opened(unit, alone=self._hooks.on_layer(unit))  # the user may have added some meanwhile

    def _begin_run(self, run: Run) -> None:
        """Notes that the backward pass asks for weights that ``run`` has computed with; raises if they are gone."""
        check_same(self.layers[run.layer], run, self.gradients)
        self._opened_for = weakref.ref(run)
        self.gradients.batches.saw(run.batch)

    def _expect(self, unit: Unit, index: int, gradient: Tensor | None) -> Tensor | None:
        # A layer that needs nothing of its weights in the backward pass (an addition) first shows by its gradient. It
        # is opened before autograd adds this gradient to one that the user keeps on the host.
        assert unit.layer is not None
        if self.gradients.layer != unit.layer or not self.window.is_bound(unit.layer) or self.turns.elsewhere:
            self._return_to(unit.layer, None)
        return self.gradients.parts.arriving(unit, index, gradient)

    def _close_layer(self, *, failed: bool = False) -> None:
        self.second_runs.forget()  # another layer comes into the slot next
        if (layer := self.gradients.layer) is None:
            return
        self.window.computed(layer, backward=True, failed=failed)
        done = None
        try:
            if (ready := self.gradients.close(failed=failed)) is not None:
                optimizer = self.own_optimizer
                assert optimizer is not None  # it has asked for them
                done = update_now(self, optimizer, ready.unit, ready.gradients, ready.after)
                ready.updated(done)
        finally:  # an update may be refused
            self.window.end_backward(layer, failed=failed)
        if done is not None:
            self.window.changed([layer])

    @opaque
    def close_backward(self) -> None:
        """Ends a backward pass: its last layer, and the gradients that the user now sees."""
        self.check_open()
        self.turns.check()
        self._end_backward(failed=not self.turns.in_backward)  # else the end of the pass would have come here first

    def _end_backward(self, *, failed: bool = False) -> None:
        self._close_layer(failed=failed)
        if self._backward_open:
            self.gradients.publish(failed=failed)
            self._backward_open = False
            self.stopwatch.leave(more=self.gradients.more)
        self.device_gradients.close()
        self.gradients.parts.forget()

    def begin_pass(self, number: int, passes: int) -> None:
        """Called when backward pass ``number`` (from 0) of the ``passes`` of a step begins, in a part of the model."""
        self.gradients.summed, self.gradients.more = passes > 1, number < passes - 1

    # What the optimizer and the parameters say.

    def adopt(self, optimizer: HostAdamW) -> None:
        """Makes ``optimizer`` one that updates this model; raises where its other ones do not allow that."""
        self.optimizers.add(optimizer)
        self.gradients.since_step.clear()  # it begins without states
        self.gradients.optimizer = self.optimizers.newest
        if self.device.is_host and not self.store.paths and not optimizer.in_backward:
            native.keep_freed_memory(optimizer)  # the others are there to take little memory, not to be fast

    def agree(self, optimizer: HostAdamW, given: Mapping[Unit, Mapping[int, Tensor]]) -> None:
        check_process(self._born)
        agree_on_step(self.replicas, optimizer, given)

    def collect(self, given: Mapping[Unit, dict[int, Tensor]]) -> dict[Unit, dict[int, HostGrad]]:
        """Returns gradients, by index, where their units are updated, complete, with their squares on the host."""
        for unit in given:
            self.take_writes(unit)
        collected = self.device_gradients.collect({u: its for u, its in given.items() if u.is_root or u.resident})
        return {u: collected[u] if u in collected else self.gradients.collect(its) for u, its in given.items()}

    def take_writes(self, unit: Unit) -> bool:
        """Brings the host's memory of ``unit`` up to what the user wrote into its parameters, if anything."""
        unit.copies.settle(held=bool(unit.aliased))
        if not unit.was_written():
            return False
        check_process(self._born)  # a child has not got the masters' remainders
        unit.wait_updated()
        if not unit.has_device_copy:
            self._fetch_again([unit])
            unit.take_writes()
            return True
        arrived = [torch.empty_like(weight) for weight in unit.weight]
        for value, there in zip(arrived, unit.on_device, strict=True):
            self.device.compute_copy(value, there)
        # The host is to compare its weight with what was written on the device.
        self.waits.host(self.device.record_event(), Wait.ROOT_WRITTEN)
        unit.take_writes(arrived)
        return True

    def settled_value(self, unit: Unit, index: int, *, exact: bool) -> Tensor:
        """Returns a parameter's value once no update of it is under way: in the compute dtype, or its fp32 master.

        What the user wrote is in it. It is where the unit lives, and may be its memory: for reading, and until then.
        """
        unit.wait_on_host()  # of a root parameter, the host's own copy is read here
        unit.wait_updated()
        self.take_writes(unit)
        return unit.master(index) if exact else unit.weight[index]

    def update_threads(self) -> Threads:
        """Returns how many cores an update takes: what keeps memory busy, but one for the thread that computes."""
        # A GPU idles where the thread that launches its kernels gets no core; on the CPU both share all cores.
        beside = self.device.torch_device.type != "cpu"
        return Threads(max(1, native.usable_cores() // self._processes_here - beside), measured=beside)

    def changed(self, units: Sequence[Unit]) -> None:
        """Called when updates of ``units`` have been submitted; their copies on the device are stale from then on."""
        # Autograd itself refuses a backward pass to a forward pass with other values of the root, by their versions.
        self._root.count_version(unit for unit in units if unit.is_root)
        self._fetch_again(units)

    def _fetch_again(self, units: Sequence[Unit]) -> None:
        self.window.changed([unit.layer for unit in units if unit.layer is not None])

    # Its own.

    def _alive(self) -> list[Run]:
        if len(alive := [run for reference in self._runs if (run := reference()) is not None]) < len(self._runs):
            self._runs = [weakref.ref(run) for run in alive]
        return alive

    def _attach(self, unit: Unit) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for index, (parameter, weight) in enumerate(zip(unit.parameters, unit.weight, strict=True)):
                give_values(parameter, weight)
                own = type(parameter) if type(parameter) is not nn.Parameter else None
                parameter.__dict__.update(_unit_reference=weakref.ref(unit), _index=index, _own_class=own)
                unit.attach(index)
        become(OffloadedParameter, unit.parameters)
        unit.sample()
