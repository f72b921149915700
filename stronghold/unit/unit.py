"""Where one unit of parameters lives on the host: a layer, or parameters of the root."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.device import Buffer, Event, Wait, Waits, check_process, forks
from stronghold.layout import ALIGNMENT_BYTES, BLOCK, GRAIN, PAGE_BYTES, Layout, lay_out, round_up, shares
from stronghold.unit.attributes import raw_version, requires_grad, same_octets
from stronghold.unit.computed_with import ComputedWith
from stronghold.unit.copies import Copies
from stronghold.unit.fetched import Fetched
from stronghold.unit.gradient_memory import GradientMemory
from stronghold.unit.handed_out import HandedOut, common_error
from stronghold.unit.masters import Masters
from stronghold.unit.own_writes import OwnWrites
from stronghold.unit.packed import is_packed
from stronghold.unit.replicas import ONE_REPLICA, Replicas
from stronghold.unit.room import check_room, missing_remainders
from stronghold.unit.samples import Samples
from stronghold.unit.unit_memory import Kind, Memory
from stronghold.unit.users import Turn, Users, is_aliased


class Unit:
    """The memory of one unit, and what is under way in it.

    ``layer`` is the layer's number, or None for a root parameter. ``dtype`` is what the parameters compute in, one for
    all or one for each. ``weight`` are views of that dtype: what is copied to the device and what the parameter is
    outside the window. A ``resident`` unit, a layer or a root parameter, has all of that on the device. Another root
    parameter ``has_device_copy`` on a device with memory of its own: the parameter is that copy. ``alignment`` is that
    of its tensors in memory, in bytes. An index is a parameter's number in its unit.

    The engine owns its units and the store; a unit refers to both weakly, and so does a parameter to its unit.
    """

    def __init__(
        self,
        layer: int | None,
        name: str,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype | Sequence[torch.dtype],
        *,
        resident: bool = False,
        has_device_copy: bool = False,
        alignment: int = ALIGNMENT_BYTES,
    ) -> None:
        self._born = forks()
        self.layer = layer
        self.name = name
        self.parameters = list(parameters)
        self.dtypes = [dtype] * len(self.parameters) if isinstance(dtype, torch.dtype) else list(dtype)
        self.resident = resident
        self._apart = has_device_copy
        self.shapes = [tuple(p.shape) for p in parameters]
        self._rounded = [p.dtype != own for p, own in zip(parameters, self.dtypes, strict=True)]
        self.counts = [p.numel() for p in parameters]
        self.elements = sum(self.counts)
        self.alignment = alignment
        sizes = [count * own.itemsize for count, own in zip(self.counts, self.dtypes, strict=True)]
        self.layout: Layout = lay_out(sizes, alignment)
        self._owner: weakref.ref[Any] | None = None
        self.waits: Waits | None = None
        self._end_backward: weakref.WeakMethod[Callable[[], None]] | None = None
        self._turn: weakref.WeakMethod[Turn] | None = None
        self.buffer: Buffer | None = None
        self.weight: list[Tensor] = []
        self.on_device: list[Tensor] = []
        """Where parameters of the root have a device copy, views of that; a layer has none but its slot."""
        self.device_copy: Buffer | None = None
        self.masters = Masters()
        self._learned = False
        """Whether an update or a checkpoint has written the masters."""
        self._memory_of: weakref.ref[Memory] | None = None
        self.gradients = GradientMemory(self)
        self.updated: Event | None = None
        """Happens when the update under way is complete; None where none is."""
        self.fetched, self.copies = Fetched(), Copies()
        self.update_reads: list[Tensor] = []
        """What the update under way copies from the device: kept until the computation is behind that."""
        self.touched = False
        """The user may have written the weights by a way that leaves no trace in the version."""
        self.versions = [0] * len(self.parameters)
        self._samples: Samples | None = None
        self._told: set[int] = set()
        """The parameters of which it is known that the user writes them, since this was last asked."""
        self._users = Users()
        self.aliased: list[int] = []
        """The parameters over whose memory the user held a tensor when this was last asked."""
        self.computed_with = ComputedWith()
        self.handed_out, self.own_writes = HandedOut(), OwnWrites()
        self.replicas: Replicas = ONE_REPLICA
        """The processes that train the unit; those of a machine have it in common, unless it is resident."""
        self.on_disk: frozenset[Kind] = frozenset()
        """What of the unit is on disk; the rest is in host memory, or on the device."""
        self.generation = 0
        """Counts what has changed the weights: updates, and writes that show in the versions."""
        self.writes = 0
        """Counts how often the user may have written the weights, whether it shows or not."""

    def belong_to(self, owner: object, waits: Waits, end_backward: Callable[[], None], turn: Turn) -> None:
        """Notes whose unit this is, and what it calls: ``waits`` for what is under way in it, ``end_backward`` before
        the user looks at a gradient, for an error may have ended a pass, ``turn`` where no other thread may compute.
        """
        self._owner, self.waits, self._turn = weakref.ref(owner), waits, weakref.WeakMethod(turn)
        self.copies.waits = waits
        self._end_backward = weakref.WeakMethod(end_backward)

    @property
    def owner(self) -> Any:
        """The engine, as long as it is there; here nothing is asked of it."""
        return None if self._owner is None else self._owner()

    def end_backward(self) -> None:
        """Publishes the gradients of a backward pass that an error has ended."""
        if self._end_backward is not None and (end := self._end_backward()) is not None:
            end()

    def in_turn(self) -> AbstractContextManager[None]:
        """Runs the block while no other thread computes; raises OffloadedModelError in a backward pass of one."""
        return turn() if self._turn is not None and (turn := self._turn()) is not None else nullcontext()

    @property
    def _memory(self) -> Memory | None:
        return None if self._memory_of is None else self._memory_of()

    @property
    def memory(self) -> Memory:
        """Who gives the unit its memory: the store, which it is placed in."""
        memory = self._memory
        assert memory is not None
        return memory

    @property
    def dtype(self) -> torch.dtype:
        """What most of the unit's elements compute in, but for packed weights."""
        counts = Counter[torch.dtype](dict.fromkeys(self.dtypes, 0))
        for dtype, count, parameter in zip(self.dtypes, self.counts, self.parameters, strict=True):
            counts[dtype] += count * (not is_packed(parameter))
        return counts.most_common(1)[0][0]

    @property
    def is_root(self) -> bool:
        return self.layer is None

    @property
    def has_device_copy(self) -> bool:
        """Whether the parameter is a copy on the device, of weights on the host."""
        return self._apart and not self.resident

    @property
    def trainable(self) -> bool:
        return any(requires_grad(p) for p in self.parameters)

    @property
    def slot_bytes(self) -> int:
        """What the unit's weights take in a slot of the window: with their file's last page, if they are on disk."""
        return round_up(self.layout.total_bytes, self.alignment)

    def lives(self, kind: Kind) -> str:
        """Returns where a part of the unit is: on the "device", on "disk", or on the "host"."""
        return "device" if self.resident else "disk" if kind in self.on_disk else "host"

    def place(self, memory: Memory, values: Iterable[Tensor] | None = None) -> None:
        """Allocates the weights, and the remainders that training or exactness need, and fills them.

        ``values`` are taken one after another; without them they are the parameters' own.
        """
        values = [p.detach() for p in self.parameters] if values is None else values
        indices = self.make_room(memory)
        self.replicas.from_rank0(lambda: self._fill(values, indices))
        for tensor in (*self.weight, *self.masters.remainders.values()):
            self.replicas.take_first(tensor, common=not self.resident)

    def _fill(self, values: Iterable[Tensor], indices: Sequence[int]) -> None:
        for index, (weight, value) in enumerate(zip(self.weight, values, strict=True)):
            if index in indices:
                self.masters.fill(index, weight, value.to(weight.device, torch.float32).contiguous())
            else:
                weight.copy_(value)

    def make_room(self, memory: Memory) -> list[int]:
        """Allocates the weights and the remainders, as they are there; returns which parameters have a remainder."""
        self._memory_of = weakref.ref(memory)
        self.buffer = self.allocate(self.layout.total_bytes, "weights")
        self.weight = [
            self.buffer.view(offset, shape, dtype)
            for offset, shape, dtype in zip(self.layout.offsets, self.shapes, self.dtypes, strict=True)
        ]
        if indices := self.master_places():
            self._place_remainders(indices)
        return indices

    def allocate(self, length_bytes: int, kind: Kind) -> Buffer:
        """Allocates memory where this part of the unit lives: on the host, on disk, or on the device."""
        return self.memory.allocate(self, length_bytes, kind)

    def check_memory(self, *, host_bytes: int, device_bytes: int, what: str) -> None:
        """Raises BudgetError or MemoryError where the store has no room for ``what`` of this unit."""
        if (memory := self._memory) is not None:
            memory.check_memory(host_bytes=host_bytes, device_bytes=device_bytes, what=what)

    def master_places(self) -> list[int]:
        """Returns which parameters have a remainder: those in bf16 that are trained."""
        indices = [index for index, dtype in enumerate(self.dtypes) if dtype != torch.float32]
        return [index for index in indices if requires_grad(self.parameters[index])]

    def master(self, index: int) -> Tensor:
        """Returns the fp32 master of a parameter: a copy, or with fp32 compute the weight itself.

        Raises OffloadedModelError in a child of fork, which the remainders are not for.
        """
        if self.dtypes[index] == torch.float32 or is_packed(self.parameters[index]):
            return self.weight[index]
        if index not in self.masters.remainders:
            return self.weight[index].float()
        check_process(self._born)  # a child has not got the remainders
        return self.masters.value(index, self.weight[index])

    def remainder(self, index: int) -> Tensor | None:
        """Returns what the optimizer updates beside the weight, or None with fp32 compute."""
        if self.dtypes[index] == torch.float32:
            return None
        if index not in self.masters.remainders:
            check_room([missing_remainders(self, [index])], f"the low bits of {self.name}'s fp32 masters")
            self._place_remainders([index])
        return self.masters.remainders[index]

    def place_remainders(self, indices: Iterable[int]) -> None:
        """Allocates remainders of what was frozen until now, whose weight is all there is of it; all zero."""
        if missing := [i for i in indices if self.dtypes[i] != torch.float32 and i not in self.masters.remainders]:
            self._place_remainders(missing)

    def keep_weights_alone(self) -> None:
        """Gives back what a unit that is frozen has for its training: room for gradients, and remainders.

        Of weights that were updated, or read from a checkpoint, the remainders stay: nothing else has what they hold.
        """
        self.wait_on_host()
        self.gradients = GradientMemory(self)
        if not self._learned:
            self.masters = Masters()
        self.sample()

    def has_finer_master(self, index: int) -> bool:
        """Whether a parameter that is trained has a master of more bits than its weight, or may get one."""
        if self.dtypes[index] == torch.float32 or not requires_grad(self.parameters[index]):
            return False
        check_process(self._born)
        remainder = self.masters.remainders.get(index)
        return remainder is not None and (self._rounded[index] or bool(remainder.any()))

    def remainder_bytes(self) -> int:
        """Returns what the remainders take when the unit is placed."""
        sizes = [2 * self.parameters[index].numel() for index in self.master_places()]
        return lay_out(sizes, self.alignment).total_bytes

    def shares(self, index: int) -> list[tuple[int, int]]:
        """Returns which elements each of the machine's replicas updates, (begin, end): if resident, all of them."""
        count = self.counts[index]
        if self.resident:
            return [(0, count)] * self.replicas.local_world_size
        grain = GRAIN if self.alignment == PAGE_BYTES else BLOCK
        return shares(count, self.replicas.local_world_size, grain, first=index)

    def share(self, index: int) -> tuple[int, int]:
        """Returns which elements of a parameter this process updates."""
        return self.shares(index)[self.replicas.local_rank]

    def own(self, index: int, tensor: Tensor) -> Tensor:
        """Returns, flat, what this process updates of a tensor that is like the parameter."""
        begin, end = self.share(index)
        return tensor.view(-1)[begin:end]

    def _place_remainders(self, indices: Sequence[int]) -> None:
        layout = lay_out([2 * self.parameters[index].numel() for index in indices], self.alignment)
        buffer = self.allocate(layout.total_bytes, "remainders")
        self.masters.buffers.append(buffer)
        for index, offset in zip(indices, layout.offsets, strict=True):
            remainder = buffer.view(offset, self.shapes[index], torch.int16)
            self.masters.place(index, remainder, raw_version(self.parameters[index]))

    def sample(self) -> None:
        """Notes some elements of the weights, by which a write shows that nothing tells of.

        Not of what needs none: a unit on disk, whose pages tell; a root parameter that is computed with where the user
        writes it and has no masters; and a layer on the device, where a look would wait for the computation.
        """
        in_place = self.is_root and not self.has_device_copy and not self.masters
        elsewhere = "weights" in self.on_disk or not all(weight.is_cpu for weight in self.weight)
        if self.buffer is None or in_place or elsewhere or self.is_common:
            self._samples = None
            return
        if self._samples is None:
            self._samples = Samples(self.buffer.flat, self.layout, [dtype.itemsize for dtype in self.dtypes])
        self._samples.take()

    def attach(self, index: int) -> None:
        """Called when a parameter's memory has become this unit's."""
        self.versions[index] = raw_version(self.parameters[index])
        self.masters.attach(index, self.versions[index])

    def close(self) -> None:
        """Gives the unit's memory back."""
        self.buffer, self.weight, self.on_device, self.device_copy = None, [], [], None
        self._users = Users()
        self.masters, self.updated, self.update_reads = Masters(), None, []
        self.gradients.close()

    def drop(self) -> None:
        """Takes what was looked at of the unit out of the resident set, if it is on disk.

        Not while an update writes there: what it writes would be taken for the user's.
        """
        if (memory := self._memory) is not None and (self.updated is None or self.updated.done):
            memory.drop(self)

    def wait_updated(self) -> None:
        """Waits for the update of this unit that is under way: the user uses its weights or gradients."""
        self.fetched.wait()
        if self.updated is None:
            return
        with self._waited() as event:
            assert self.waits is not None
            if self.has_device_copy:
                # The upload of the root parameter's new value must have arrived before anything computes with it.
                self.waits.compute(event, Wait.ROOT_UPLOADED)
            else:
                self.waits.host(event, Wait.WEIGHTS_READ)
        late = self.has_device_copy and event is not None and not event.done  # another stream may ask before it is
        self.updated, self.update_reads = event if late else None, []

    def wait_on_host(self) -> None:
        """Blocks until the update under way is complete, whatever the device waits for."""
        if self.updated is None:
            return
        with self._waited() as event:
            assert self.waits is not None
            self.waits.host(event, Wait.UPDATE_READ)

    @contextmanager
    def _waited(self) -> Iterator[Event | None]:
        """Counts the time of the block, which waits for the update; of one that is complete there is none to count."""
        waits, event = self.waits, self.updated
        if waits is None or event is None or event.done:
            yield event
            return
        begin = waits.device.stamp()
        yield event
        waits.for_updates.append((begin, waits.device.stamp()))

    @property
    def is_aliased(self) -> bool:
        """Whether the user holds a tensor over a parameter's memory, such as ``p.data``, and may write through it."""
        return any(map(self.is_aliased_at, range(len(self.parameters))))

    def is_aliased_at(self, index: int) -> bool:
        return is_aliased((self.on_device or self.weight)[index], self.parameters[index])

    def mark_dirty(self) -> None:
        """Called before the user or the engine may write the unit's memory: the store's checksums of it end."""
        if (memory := self._memory) is not None:
            memory.mark_dirty(self)

    def mark_aliased(self, index: int, *, unseen: bool) -> None:
        """Called when the user gets a tensor over a parameter's memory; its writes are ``unseen`` by the version."""
        if not self.is_root:  # a root parameter's is in memory: what is on disk changes when the write is taken over
            self.mark_dirty()
        self.touched |= unseen
        self._told.add(index)
        if self.computed_with.runs:
            self._expect_unseen(index)
        if self.replicas.world_size > 1:  # nobody may write it
            self.handed_out.note(index, (self.on_device or self.weight)[index])
        if self.is_common:
            return self.drop()
        # Where there is a device copy the host has its own, to compare with.
        if not self.has_device_copy and self.masters.mark_aliased(index, self.weight[index]):
            self.drop()

    def write(self, index: int, task: Callable[[], Any]) -> Any:
        """Runs ``task``, which writes into a parameter. Raises OffloadedModelError where replicas train it."""
        self.check_own()
        self.touched = True  # a function need not count a version
        self._told.add(index)
        if self.computed_with.runs:
            self._expect_unseen(index)
        if not self.is_root or (not self.has_device_copy and index in self.masters.remainders):
            self.mark_dirty()
        if self.has_device_copy or index not in self.masters.remainders:
            return task()
        return self.masters.write(index, self.weight[index], task, self.versions_now)

    @property
    def is_common(self) -> bool:
        """Whether what a parameter is here other processes have too, or the same bits of it: nobody may write it."""
        return self.replicas.world_size > 1 and not self.resident and not self.has_device_copy

    def check_own(self) -> None:
        """Raises OffloadedModelError where other processes train the same unit, or this is a child of fork."""
        check_process(self._born)
        if self.replicas.world_size > 1:
            raise common_error(self.replicas.world_size, self.name)

    def versions_now(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [p._version for p in self.parameters]

    def was_written(self) -> bool:
        """Whether the user may have written the parameters since this was last asked."""
        versions = self.versions_now()
        self._told.update(index for index, version in enumerate(versions) if version != self.versions[index])
        untold = self._untold_writes()
        held, self.aliased = self.aliased, self._users.aliased(self.on_device or self.weight, self.parameters[0])
        if versions != self.versions or untold or self.computed_with.others(self.weight):
            self.supersede()
        unseen = self.touched or self.masters.marked or bool(held or self.aliased or untold)
        written, self.touched, self.versions = unseen or versions != self.versions, False, versions
        self._told.clear()
        self.writes += written
        return written

    def supersede(self) -> None:
        """Called when the weights become others: a backward pass to a run of before is refused from here on."""
        self.generation += 1
        self.computed_with.forget()

    def will_run(self) -> None:
        """Called before a run that a backward pass may come back to, when it is known who holds what."""
        for index in self.aliased:
            self._expect_unseen(index)

    def was_written_unseen(self) -> bool:
        """Whether the weights are others than they were in the last forward pass, though no version tells of it."""
        return self.computed_with.others(self.weight) or bool(self._untold_writes())

    def _expect_unseen(self, index: int) -> None:
        if not self.is_common and self.computed_with.note(index, self.weight[index]):
            self.drop()  # it was read: a state_dict() would leave the whole model in the resident set

    def _untold_writes(self) -> list[int]:
        """Returns which parameters were written though nothing told of it, as far as their memory shows it."""
        if self.updated is not None and not self.updated.done:
            return []
        self.handed_out.check_weights(self)
        if self._samples is not None and self.device_copy is not None:  # the host's copy is the engine's alone
            return list(self._samples.differing(self.device_copy.flat))
        found = list(self._samples.written()) if self._samples is not None else []
        if self._memory is not None and self.on_disk:
            on_disk, others = self._memory.written(self)
            found += on_disk
            self.touched |= others
        written = [index for index in found if index not in self._told]
        self.masters.forget(written)
        return written

    def take_writes(self, arrived: Sequence[Tensor] = ()) -> None:
        """Brings the fp32 masters up to what the user wrote into the weights; ``arrived`` is from the device copy."""
        for index, value in enumerate(arrived):
            if not same_octets(value, self.weight[index]):
                self.mark_dirty()
                self.masters.replace(index, self.weight[index], value)
        if not self.has_device_copy and self.masters:
            self.mark_dirty()
            self.masters.take_writes(self.weight, self.versions, self.is_aliased_at)
        self.sample()

    def rewritten(self) -> None:
        """Called when the engine has written the weights, not the user: an update, or what loads a checkpoint."""
        self._learned = True
        self.handed_out.forget()
        self.masters.updated(self.weight, self.is_aliased_at)
        self.sample()
