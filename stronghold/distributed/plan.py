"""``stronghold.plan``: settings for a model on a machine, in one process or several, before anything is placed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.distributed.layered_model import LayeredModel, LayeredSequential
from stronghold.distributed.process_plans import StagedModel, best_of
from stronghold.distributed.staged_inputs import loss_of, part_of, staged_model, stages_refused, tensors_of
from stronghold.engine.planning.asked import kepts, limits, micro_batches, one_of, sizes, updates_asked
from stronghold.engine.planning.given import machine_given, model_given, token_inputs
from stronghold.engine.planning.in_parts import plan_in_parts
from stronghold.engine.planning.kept_inputs import OFF_DEVICE
from stronghold.engine.planning.searched import PlannedModel
from stronghold.planner.choices import Space
from stronghold.planner.machine_file import MachineFile
from stronghold.planner.other_cores import cores_assumed, with_cores
from stronghold.planner.step_bytes import MUON
from stronghold.planner.training_plan import TrainingPlan
from stronghold.settings import STATES


@torch.random.fork_rng([])  # which a model may seed
def plan(
    model: nn.Module | str | os.PathLike[str] | Any,
    *,
    machine: MachineFile | str | os.PathLike[str] | None = None,
    batch: int = 1,
    sequence: int | None = None,
    inputs: Tensor | Mapping[str, Any] | Sequence[Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    layers: str | Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    store: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = "ram",
    states: str | Sequence[str] = "fp32",
    update: str | None = None,
    activations: int | str | None = None,
    micro_batch: int | str | None = "auto",
    window: int | None = None,
    resident: int | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    tokens: int = 10**9,
    name: str | None = None,
    processes: int = 1,
    optimizer: str = "adamw",
    accumulate: int | None = 1,
    experts_per_part: int | str | None = None,
    cores: int | None = None,
) -> TrainingPlan:
    """Returns the settings under which a step of ``model`` is the shortest, with what it takes.

    Nothing is loaded or changed: the model may be on the meta device. What is None, or ``"auto"``, is searched over.

    Args:
        model: Any module that can be offloaded; or a model of transformers by its configuration, its config.json, or
            the folder that has it; or a row of layers (:class:`stronghold.distributed.LayeredModel`).
        machine: What ``stronghold.probe`` measured, or the path of its file, of this machine or another; by default
            what it has kept of this one.
        batch: Samples of a step, or of each of the batches that it accumulates.
        sequence: Tokens of a sample, for a model that takes ids of tokens (``input_ids``, and ``labels`` if it can).
        inputs: For any other model its arguments, tensors whose first dimension is the batch: by name, or in order.
        loss: What makes a loss of the model's output; by default its ``loss``, or the output itself.
        layers: As for ``offload``.
        dtype: The compute type, as for ``offload``.
        store: ``"ram"``, or directories, which must have been probed: then layers may be on disk as well.
        states: The formats of AdamW's moments that are allowed; 8-bit ones change numbers.
        update: ``"deferred"`` or ``"in_backward"``.
        activations: ``"recompute"``, ``"keep"`` or how many layers keep them, between which a plan chooses, or in one
            process ``"host"`` or ``"disk"``, where ``store`` is. In stages a number is refused: the plan chooses one
            for each stage, where a process has one stage.
        micro_batch: Samples over which a layer runs at a time, None for the whole batch.
        window: Layers on the device at a time.
        resident: Layers that stay there.
        device_memory: What may be taken of the device's memory, activations with it, in bytes or like ``"24GiB"``; by
            default nearly all that the machine's device has. Refused for a machine that computes on its host.
        host_memory: What the process may take of host memory; by default nine tenths of the machine's.
        tokens: Of which the table says how long training on them takes.
        name: What the model is called in the plan.
        processes: That train it together on the machine, each with an accelerator of its own, or all on its cores; they
            share its memory, threads and disks. Searched over are then stages and replicas, too: replicas of any model,
            and stages of an ``nn.Sequential`` or a row of layers, with deferred updates. Layers of stages are in RAM
            or, where that does not hold them, all in the ``store``'s directories. Of the plan, ``parallel`` and
            ``settings`` are what ``stronghold.pipeline`` takes, or ``settings`` alone ``stronghold.replicate``.
            ``device_memory`` and ``host_memory`` are what each process may take, the latter by default an equal part.
            Of replicas of one stage that cannot be the shortest, the plan that is shown beside the best may be longer
            than it has to be.
        optimizer: ``"adamw"``, or ``"muon"`` for ``stronghold.Muon``, of one process: it updates the matrices of the
            layers, but embeddings, and AdamW all else, with moments in fp32.
        accumulate: Batches whose gradients a step adds up, each in passes of its own: with more than one, updates are
            deferred, and of several processes each has the whole model. With None a step is of one batch, and the
            device has room for gradients of earlier ones, as ``offload`` plans for a loop that it does not know.
        experts_per_part: As for ``offload``, in one process: into parts of how many experts a mixture is cut, or
            ``"auto"``, the parts with which a step is the shortest where whole layers do not fit.
        cores: How many the machine is to have, in place of those that were measured: what they do takes time in
            proportion, as the plan says.

    Raises:
        BudgetError: Nothing fits; it tells what lacks least.
        ValueError: A model that cannot be planned for, a machine's file that is none, settings out of range, processes
            that cannot train it together.
    """
    if not isinstance(processes, int) or isinstance(processes, bool) or processes < 1:
        raise ValueError(f"processes must be a whole number of 1 or more (got {processes!r}); pass one")
    updates = updates_asked(update, accumulate)
    machine, row = machine_given(machine), model if isinstance(model, LayeredModel) else None
    taken = []
    if cores is not None:
        taken, machine = [cores_assumed(machine, cores)], with_cores(machine, cores)
    model = model_given(model if row is None else row.model)
    paths = [] if store == "ram" else [store] if isinstance(store, (str, os.PathLike)) else store
    directories = [os.path.realpath(path) for path in paths]
    given = inputs if inputs is not None else token_inputs(model, batch, sequence)

    def best(replicas: int, rival_s: float = math.inf, *, of: nn.Module = model) -> TrainingPlan:
        """Returns the best plan of one process, or of so many replicas where that may be shorter than ``rival_s``."""
        planned = PlannedModel(
            of,
            machine,
            given if replicas == 1 else part_of(given, replicas),
            layers=layers,
            dtype=dtype,
            directories=directories,
            loss=loss,
            sequence=sequence,
            name=name,
            activations="recompute" if activations is None else activations,
            replicas=replicas,
            by_muon=by_muon,
            accumulate=accumulate,
        )
        for text in taken:
            planned.assume(text)
        memory, count = planned.memory, len(planned.memory.units.layers)
        space = Space(
            layers=count,
            **sizes(memory, window, resident),
            kepts=kepts(activations, count, may_keep=planned.may_keep, resident=resident),
            micro_batches=micro_batches(micro_batch, planned),
            updates=updates,
            states=formats,
            stores=("disk",) if activations == "disk" else ("ram", "disk") if directories else ("ram",),
        )
        most = limits(machine, model, device_memory, host_memory, replicas)
        return planned.best(space, most, tokens=tokens, rival_s=rival_s)

    by_muon = one_of("optimizer", optimizer, ("adamw", "muon")) == "muon"
    if by_muon and processes > 1:
        raise ValueError(
            f"a plan of several processes is for AdamW (got optimizer='muon' with processes={processes}); plan one "
            "process, or for optimizer='adamw'"
        )
    if activations in OFF_DEVICE and processes > 1:
        raise ValueError(
            f"layers' inputs are planned beside the device for one process (got activations={activations!r} with "
            f"processes={processes}); pass 'recompute' or 'keep'"
        )
    if activations == "disk" and not directories:
        raise ValueError(
            "activations='disk' keeps the layers' inputs in the store's directory (got store='ram'); pass store=, a "
            "directory on a disk, or activations='host'"
        )
    formats = [one_of("states", one, STATES) for one in ([states] if isinstance(states, str) else states)]
    if by_muon:
        if formats != ["fp32"]:
            raise ValueError(
                f"Muon's momentum is in fp32, and AdamW's moments beside it (got states={states!r}); leave out states"
            )
        formats = [MUON]
    if processes == 1:
        return plan_in_parts(model, experts_per_part, lambda one: best(1, of=one))
    if experts_per_part is not None:
        raise ValueError(
            f"experts are cut apart for one process (got experts_per_part={experts_per_part!r} with "
            f"processes={processes}); leave out one or the other"
        )
    most = limits(machine, model, device_memory, host_memory, processes)
    whole = tensors_of(given)
    staged: StagedModel | str = stages_refused(
        model,
        row,
        whole,
        update=update,
        resident=resident,
        cut=micro_batch,
        activations=activations,
        accumulate=accumulate,
    )
    if not staged:
        staged = staged_model(
            row or LayeredSequential(model, lambda output, _: (loss or loss_of)(output)),
            machine,
            most,
            whole,
            dtype=dtype,
            processes=processes,
            states=formats,
            kepts=[count > 0 for count in kepts(activations, 1)],
            window=window,
            resident=resident,
            directories=directories,
        )
    samples = len(whole[0])

    def told(known: dict[str, Any]) -> TrainingPlan:
        """Returns a plan in stages of what is known of it."""
        parameters = list(model.parameters())
        return TrainingPlan(
            model=name or type(model).__name__,
            parameters=sum(p.numel() for p in parameters),
            trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
            layers=staged.space.layers if isinstance(staged, StagedModel) else 0,
            samples=samples,
            tokens=samples * (sequence or 1),
            dtype=str(dtype or parameters[0].dtype).removeprefix("torch."),
            machine=machine.device_name,
            device=machine.device,
            is_host=machine.is_host,
            process_bytes=most.process,
            asked_tokens=tokens,
            assumed=taken,
            **known,
        )

    return best_of(
        processes,
        batch=samples,
        layers=staged.space.layers if isinstance(staged, StagedModel) else 0,
        staged=staged,
        states=formats,
        replicated=best,
        told=told,
    )
