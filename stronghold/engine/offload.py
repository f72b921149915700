"""``offload(model)`` and what is asked of the model that it returns."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.device import Device, Timeline, open_device, tell_of_slow_products
from stronghold.engine.arranging import Asked
from stronghold.engine.closing import close_engine
from stronghold.engine.compiled import uncompiled
from stronghold.engine.engine import Engine
from stronghold.engine.first_pass import await_inputs
from stronghold.engine.methods import Apply, Compile, Replicate
from stronghold.engine.reopening import Reopened
from stronghold.engine.taking_in import live
from stronghold.errors import OffloadedModelError
from stronghold.formats.kept_in_fp32 import keep_in_fp32
from stronghold.native import return_free_memory
from stronghold.planner.training_plan import TrainingPlan
from stronghold.settings import OffloadSettings
from stronghold.unit import ONE_REPLICA, Replicas, unit_of
from stronghold.weights import Weights, open_weights


def offload(
    model: nn.Module,
    *,
    window: int | str = "auto",
    store: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = "ram",
    device: str | torch.device | Device = "cuda",
    dtype: torch.dtype | None = None,
    layers: str | Sequence[str] | None = None,
    experts_per_part: int | str | None = None,
    micro_batch: int | str | None = None,
    activations: int | str | None = None,
    resident: int | str | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    accumulate: int | None = None,
    update: str | None = None,
    states: str | None = None,
    weights: Weights | None = None,
    compile: bool | str | Mapping[str, Any] = False,
    inputs: Tensor | Mapping[str, Any] | Sequence[Any] | None = None,
    plan: TrainingPlan | str | os.PathLike[str] | None = None,
) -> nn.Module:
    """Moves the layers of ``model`` into the store and computes them through a window; returns the same module.

    The model is changed in place and used as before. Outside its own computation a layer's parameter is an ordinary
    CPU tensor, and so is its gradient; root parameters (embedding, final norm, head) stay on the device.

    A model larger than memory is built on the ``meta`` device, with real buffers
    (``accelerate.init_empty_weights(include_buffers=False)``), and ``weights`` gives its values, which never are in
    memory beyond a layer.

    A store's directory that :func:`stronghold.checkpoint.save` has made a checkpoint is reopened by naming it twice,
    ``store=DIR, weights=DIR``: everything in it is compared with its checksums and used where it is. Placement and
    formats must be those that it was saved with; AdamW and :func:`stronghold.checkpoint.load` of ``DIR`` come next.

    Args:
        model: Any module with a repeated block, on the CPU or the meta device.
        window: Layers on the device at a time, or ``"auto"``: with ``inputs`` the planner's answer, as for all that is
            ``"auto"``; without, where nobody knows what activations take, as many as ``device_memory`` (by default the
            free memory) allows with half of it left to them. Where nothing else is set but ``dtype``, ``layers``,
            ``weights`` and parts of experts, that is until the first training pass under ``stronghold.AdamW``: window,
            resident layers and activations are planned for its inputs, with half of the memory left to larger ones, and
            layers move. On the CPU, where a slot would be a second copy in the same memory, ``"auto"`` has all layers
            in RAM computed with where they are, unless there is a budget.
        store: Where layers and states live: ``"ram"``, a directory, or a list of directories on drives of their own.
        device: Where layers compute.
        dtype: The compute type, torch.float32 or torch.bfloat16; by default each parameter's own. With bf16 the fp32
            master is kept exactly, as the weight and a 16-bit remainder; fp32 that transformers keeps so stays fp32.
        layers: The containers of the layers, by name, where they are not found by themselves.
        experts_per_part: Experts of a mixture that go through the window together, as :func:`split_experts` cuts them;
            ``"auto"`` for all of a layer where it fits ``device_memory`` (by default the free memory) or, with
            ``inputs``, the planner's limits, else half of them, a quarter and so on: as many as fit or, with
            ``inputs``, make the shortest step. Cut experts are new parameters, which an optimizer that was made before
            does not have. By default a layer is whole.
        micro_batch: Samples over which a layer runs at a time, so that weights cross the bus once however large the
            batch; None for the whole batch, or with ``inputs`` the same as ``"auto"``.
        activations: What the backward pass finds: ``"recompute"`` (each layer runs again from its input), ``"host"``
            (the same, with the inputs in host memory), ``"disk"`` (with the inputs in a file in the store's directory,
            which has no name, so that it ends with the process), ``"keep"`` (everything autograd saves stays on the
            device) or a number (so many layers, the last ones, keep it, and the others run again). By default
            ``"recompute"``, with ``inputs`` ``"auto"``.
        resident: Layers that stay wholly on the device, weights, gradients and states, and are updated there;
            ``"auto"`` for as many as ``device_memory`` holds, or without one half of the free memory, with moments in
            fp32 (it is the optimizer that says later which they are). What is left beside the window goes to root
            parameters, and with ``"auto"`` they come first: one whose states do not fit is updated on the host. By
            default 0, with ``inputs`` ``"auto"``.
        device_memory: A budget in bytes, or like ``"24GiB"``: what cannot fit is refused before anything has changed,
            here or when the optimizer is made. It counts slots, gradient slots, the root and resident layers;
            activations depend on the batch and come on top, but with ``inputs`` are known and count.
        host_memory: The same of weights, gradients, AdamW's states and, with ``activations="host"``, the layers' inputs
            in host memory, known beforehand with ``inputs``, and else from the first forward pass on. With a store on
            disk it is what may be kept in RAM.
        accumulate: Batches whose gradients a step adds up; budgets and plans then have room for the sums, in fp32.
        update: What AdamW will be told, where that is known. With a store on disk, ``host_memory`` is filled for it:
            else RAM has room for the gradients of all layers and for moments in fp32, which ``"in_backward"`` and
            ``"8bit"`` do not take. With ``inputs`` the plan is for it.
        states: The same.
        weights: What gives a model its values: the folder of a checkpoint (safetensors, sharded or not, as transformers
            writes it), whose tensors are converted to the parameters' dtypes (fp32 where transformers keeps that beside
            16 bits); or a function that initialises the module it is given in place, such as ``model._init_weights`` of
            a transformers model. It is called for every module in the order of ``nn.Module.apply``, children first,
            once the parameters of its layer, or of its part of the model outside the layers, are in memory (of the
            modules that hold layers: their own); what it leaves without numbers is an error. A shared parameter is
            initialised with the first part that has it; parameters that have values keep them.
        compile: Whether layers are compiled, one graph for each class of layer: True for torch.compile as it is by
            default, a backend's name, or a dictionary of its ``backend``, ``mode``, ``options``, ``dynamic`` and
            ``fullgraph``. ``layer.compile(...)`` of single layers does the same, before and after. Without
            ``dynamic=True`` each shape has graphs of its own. What ``activations`` has computed again is computed again
            in the backward graph. A layer that cannot be compiled runs eagerly, which a warning says once and the
            report counts; with ``fullgraph=True`` it is an error.
        inputs: A batch such as the model will be trained with, its arguments by name or in order; sizes alone count,
            so that tensors may be on the meta device. What is ``"auto"`` is then planned, as by ``stronghold.plan``,
            for the machine that ``stronghold.probe`` has kept, or that is glanced at for some seconds, and for
            ``stronghold.AdamW`` as it is by default, or, where gradients do not all fit, with ``update="in_backward"``:
            ``"auto"`` takes what was planned for. The report, and the logger ``stronghold``, tell what and why.
        plan: What ``stronghold.plan`` has found, or its file: it has all the settings but ``dtype``, which must be as
            planned, and the report shows it beside what is measured.

    Returns:
        The same module, changed in place.

    Raises:
        ValueError: Settings out of range, a model without a repeated block, ``weights`` that do not give each
            parameter a value of its shape, or hold more; inputs that the model does not run on, a plan of another
            model, machine or type, or settings beside one that say otherwise.
        BudgetError: Budgets that cannot hold it.
        OSError: A plan's file that cannot be read.
        OffloadedModelError: A model that is offloaded already.
        StoreError: A directory that is in use, another model's, or a run's that would be overwritten.
        CheckpointError: A directory to be reopened that is not whole; CorruptionError where its bytes are not.
    """
    is_open = inputs is not None or plan is not None
    settings = OffloadSettings(
        window=window,
        store=store,
        micro_batch="auto" if micro_batch is None and is_open else micro_batch,
        activations=activations if activations is not None else "auto" if is_open else "recompute",
        resident=resident if resident is not None else "auto" if is_open else 0,
        device_memory=device_memory,
        host_memory=host_memory,
        accumulate=accumulate,
        update=update,
        states=states,
        compile=compile,
    )
    beside = {"experts_per_part": experts_per_part, "inputs": inputs, "plan": plan}
    offloaded = _offload(model, settings, device, dtype, layers, weights, ONE_REPLICA, **beside)  # type: ignore[arg-type]
    told = OffloadSettings(accumulate=accumulate, update=update, states=states)
    if not is_open and activations is resident is None and settings == told:
        await_inputs(uncompiled(offloaded), known_engine(offloaded), layers, accumulate)
    return offloaded


def offload_shared(
    model: nn.Module,
    replicas: Replicas,
    *,
    device: str | torch.device | Device,
    dtype: torch.dtype | None = None,
    layers: str | Sequence[str] | None = None,
    weights: Weights | None = None,
    shared: Sequence[nn.Parameter] = (),
    **settings: Any,
) -> nn.Module:
    """Does the same in each of ``replicas``, which have the host's memory of the model in common.

    Of the parameters ``shared`` other processes update copies, to the same bits: all of them on the host.
    """
    return _offload(model, OffloadSettings(**settings), device, dtype, layers, weights, replicas, shared)


def _offload(
    model: nn.Module,
    settings: OffloadSettings,
    device: str | torch.device | Device,
    dtype: torch.dtype | None,
    layers: str | Sequence[str] | None,
    weights: Weights | None,
    replicas: Replicas,
    shared: Sequence[nn.Parameter] = (),
    *,
    experts_per_part: int | str | None = None,
    inputs: Tensor | Mapping[str, Any] | Sequence[Any] | None = None,
    plan: TrainingPlan | str | os.PathLike[str] | None = None,
) -> nn.Module:
    given, model = model, uncompiled(model)
    if engine_of(model) is not None:
        raise OffloadedModelError(
            f"{type(model).__name__} is offloaded already, and a module can be offloaded once; build it anew to change "
            "its settings"
        )
    if any(unit_of(parameter) is not None for parameter in model.parameters()):
        raise OffloadedModelError(
            f"a part of {type(model).__name__}, or a model that it is a part of, is offloaded already, and a parameter "
            "can be offloaded once; offload the whole model"
        )
    if isinstance(weights, (str, os.PathLike)):
        keep_in_fp32(model)  # before it is placed, by dtypes
    opened, reopen = open_device(device), _same_directory(weights, settings)
    asked = Asked(
        settings=settings,
        device=opened,
        dtype=dtype,
        layers=layers,
        experts_per_part=experts_per_part,
        replicas=replicas,
        shared=shared,
        reopen=reopen,
        inputs=inputs,
        plan=plan,
    )
    arranged = asked.arrange(model)
    tell_of_slow_products((d for unit in arranged.placement.layers for d in unit.dtypes), opened)
    values = Reopened(model) if reopen else open_weights(model, weights)
    placed, own = (arranged.placement, opened, arranged.settings), opened is not device
    engine = Engine(model, *placed, values, replicas, planned=arranged.planned, own_device=own)
    model.__dict__["_stronghold"] = engine
    live.add(engine)
    for module in model.modules():
        module._apply = Apply(module, engine)  # type: ignore[method-assign]
        module._replicate_for_data_parallel = Replicate(module, engine)  # type: ignore[method-assign]
    for block in engine.blocks:
        block.module.compile = Compile(block.module, block)  # type: ignore[method-assign]
    return_free_memory()  # the parameters' own, which the store has taken over
    return given


def _same_directory(weights: Weights | None, settings: OffloadSettings) -> bool:
    if not isinstance(weights, (str, os.PathLike)) or not settings.directories:
        return False
    return os.path.realpath(weights) == os.path.realpath(settings.directories[0])


def engine_of(model: nn.Module) -> Engine | None:
    """Returns the engine of an offloaded model, or of the one that a PeftModel was made of since; or None."""
    model = uncompiled(model)
    engine: Engine | None = model.__dict__.get("_stronghold")
    if engine is None and "peft" in sys.modules and isinstance(model, sys.modules["peft"].PeftModel):
        return engine_of(model.get_base_model())  # type: ignore[operator]
    return engine


def close(model: nn.Module) -> None:
    """Waits for the updates of an offloaded model and gives back, at once, its memory, threads, locks and files.

    The same happens when nothing refers to the model and its optimizer any more; ``close`` does it before that:
    a notebook's variables, a trainer. Afterwards model and optimizer cannot be used, which is an OffloadedModelError;
    to close a model twice changes nothing. Files of a checkpoint in place stay. Tensors that the user got from the
    model before (a ``state_dict()``, say) keep their values and their memory.

    Raises what made an update fail, when all is given back, and OffloadedModelError for a model that is not offloaded.
    """
    close_engine(known_engine(model, closed=True))


def verify(model: nn.Module) -> None:
    """Reads all that an offloaded model has on disk and compares it with the checksums of what was written.

    Waits for the updates under way. A model in memory has nothing to compare. Raises CorruptionError or DiskError,
    which name the file and the layer, and OffloadedModelError for a model that is not offloaded.
    """
    known_engine(model).store.verify()


def known_engine(model: nn.Module, *, closed: bool = False) -> Engine:
    engine = engine_of(model)
    if engine is None:
        raise OffloadedModelError(f"{type(model).__name__} is not offloaded; call stronghold.offload(model) first")
    if not closed:
        engine.check_open()
    return engine


@contextmanager
def trace(model: nn.Module) -> Iterator[Timeline]:
    """Records what the computation, the streams and the disk do for ``model`` inside of the block, a step say.

    ``spans()`` of what it yields are the parts afterwards, a lane each for "compute", "waits" (for layers), "fetches",
    "gradients" (on their way down), "updates", "root", "disk reads" and "disk writes"; it blocks until what the block
    gave to the streams has been done. Recording waits for nothing, but for the computation once, at the beginning.

    Raises OffloadedModelError for a model that is not offloaded.
    """
    device = known_engine(model).device
    timeline = device.timeline = Timeline(device)
    try:
        yield timeline
    finally:
        device.timeline = None
