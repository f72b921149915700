"""``offload(model)`` and what is asked of the model that it returns."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.device import Device, Timeline, open_device, return_free_memory
from stronghold.engine.closing import close_engine
from stronghold.engine.compiled import uncompiled
from stronghold.engine.engine import Engine
from stronghold.engine.placement import plan
from stronghold.engine.reopening import Reopened, kept_on_disk
from stronghold.errors import OffloadedModelError
from stronghold.optim.held import name_of
from stronghold.reports import Report
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
    micro_batch: int | None = None,
    activations: str = "recompute",
    resident: int | str = 0,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    weights: Weights | None = None,
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
        window: Layers on the device at a time, or ``"auto"`` for as many as ``device_memory`` (by default the free
            memory) allows with half of it left to activations. On the CPU, where a slot would be a second copy in the
            same memory, ``"auto"`` has all layers in RAM computed with where they are, unless there is a budget.
        store: Where layers and states live: ``"ram"``, a directory, or a list of directories on drives of their own.
        device: Where layers compute.
        dtype: The compute type, torch.float32 or torch.bfloat16; by default each parameter's own. With bf16 the fp32
            master is kept exactly, as the weight and a 16-bit remainder.
        layers: The containers of the layers, by name, where they are not found by themselves.
        micro_batch: Samples over which a layer runs at a time, so that weights cross the bus once however large the
            batch; None for the whole batch.
        activations: What the backward pass finds: ``"recompute"`` (each layer runs again from its input), ``"host"``
            (the same, with the inputs in host memory) or ``"keep"`` (everything autograd saves stays on the device).
        resident: Layers that stay wholly on the device, weights, gradients and states, and are updated there;
            ``"auto"`` for as many as ``device_memory`` holds, or without one half of the free memory, with moments in
            fp32 (it is the optimizer that says later which they are). What is left beside the window goes to root
            parameters, and with ``"auto"`` they come first: one whose states do not fit is updated on the host.
        device_memory: A budget in bytes, or like ``"24GiB"``: what cannot fit is refused before anything has changed,
            here or when the optimizer is made. It counts slots, gradient slots, the root and resident layers;
            activations depend on the batch and come on top.
        host_memory: The same of weights, gradients and AdamW's states in host memory. With a store on disk it is what
            may be kept in RAM.
        weights: What gives a model its values: the folder of a checkpoint (safetensors, sharded or not, as transformers
            writes it), whose tensors are converted to the parameters' dtypes; or a function that initialises the module
            it is given in place, such as ``model._init_weights`` of a transformers model. It is called for every module
            in the order of ``nn.Module.apply``, children first, once the parameters of its layer, or of its part of the
            model outside the layers, are in memory (of the modules that hold layers: their own parameters); what it
            leaves without numbers is an error. A shared parameter is initialised with the first part that has it;
            parameters that have values keep them.

    Returns:
        The same module, changed in place.

    Raises:
        ValueError: Settings out of range, a model without a repeated block, or ``weights`` that do not give each
            parameter a value of its shape, or hold more.
        BudgetError: Budgets that cannot hold it.
        OffloadedModelError: A model that is offloaded already.
        StoreError: A directory that is in use, another model's, or a run's that would be overwritten.
        CheckpointError: A directory to be reopened that is not whole; CorruptionError where its bytes are not.
    """
    settings = OffloadSettings(
        window=window,
        store=store,
        micro_batch=micro_batch,
        activations=activations,
        resident=resident,
        device_memory=device_memory,
        host_memory=host_memory,
    )
    return _offload(model, settings, device, dtype, layers, weights, ONE_REPLICA)


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
    opened = open_device(device)
    reopen = _same_directory(weights, settings)
    on_host = [*shared, *(kept_on_disk(model, settings.directories[0]) if reopen else ())]
    placement = plan(model, layers, dtype, settings, opened, replicas, on_host)
    values = Reopened(model) if reopen else open_weights(model, weights)
    engine = Engine(model, placement, opened, settings, values, replicas, own_device=opened is not device)
    model.__dict__["_stronghold"] = engine
    for module in model.modules():
        module._apply = _Apply(module, engine)  # type: ignore[method-assign]
    return_free_memory()  # the parameters' own, which the store has taken over
    return given


def _same_directory(weights: Weights | None, settings: OffloadSettings) -> bool:
    if not isinstance(weights, (str, os.PathLike)) or not settings.directories:
        return False
    return os.path.realpath(weights) == os.path.realpath(settings.directories[0])


class _Apply:
    """Stands for ``nn.Module._apply``: ``.to(device)`` on an offloaded model changes nothing, or is refused.

    Trainers move their model to the device as a matter of course.
    """

    def __init__(self, module: nn.Module, engine: Engine) -> None:
        self._module = weakref.ref(module)
        self._engine = weakref.ref(engine)

    def __deepcopy__(self, memo: dict) -> Any:
        return getattr(memo.get(id(self._module())), "_apply", None)

    def __reduce__(self) -> Any:
        return getattr, (self._module(), "_apply")

    def __call__(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module | None:
        engine, module = self._engine(), self._module()
        if engine is not None:
            engine.check_open()
            for dtype in sorted({dtype for unit in engine.units for dtype in unit.dtypes}, key=str):
                probe = torch.empty(0, dtype=dtype, device=engine.device.torch_device)
                result = function(probe)
                if result.device != probe.device or result.dtype != probe.dtype:
                    raise OffloadedModelError(
                        f"an offloaded model stays on {probe.device} with dtype {probe.dtype} (got a move to "
                        f"{result.device}, {result.dtype}); build it anew and pass device= and dtype= to offload()"
                    )
        return module


def engine_of(model: nn.Module) -> Engine | None:
    """Returns the engine of an offloaded model, or None."""
    return uncompiled(model).__dict__.get("_stronghold")


def close(model: nn.Module) -> None:
    """Waits for the updates of an offloaded model and gives back, at once, its memory, threads, locks and files.

    The same happens when nothing refers to the model and its optimizer any more; ``close`` does it before that:
    a notebook's variables, a trainer. Afterwards model and optimizer cannot be used, which is an OffloadedModelError;
    to close a model twice changes nothing. Files of a checkpoint in place stay. Tensors that the user got from the
    model before (a ``state_dict()``, say) keep their values and their memory.

    Raises what made an update fail, when all is given back, and OffloadedModelError for a model that is not offloaded.
    """
    close_engine(_known_engine(model, closed=True))


def verify(model: nn.Module) -> None:
    """Reads all that an offloaded model has on disk and compares it with the checksums of what was written.

    Waits for the updates under way. A model in memory has nothing to compare. Raises CorruptionError or DiskError,
    which name the file and the layer, and OffloadedModelError for a model that is not offloaded.
    """
    _known_engine(model).store.verify()


def _known_engine(model: nn.Module, *, closed: bool = False) -> Engine:
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
    device = _known_engine(model).device
    timeline = device.timeline = Timeline(device)
    try:
        yield timeline
    finally:
        device.timeline = None


def report(model: nn.Module) -> Report:
    """Tells what an offloaded model takes of each memory, and where its last step's time went.

    Raises OffloadedModelError for a model that is not offloaded.
    """
    engine = _known_engine(model)
    optimizer: Any = engine.optimizer() if engine.optimizer is not None else None
    unit, device = engine.layers[0], engine.device
    parameters = [p for h in engine.units for p in h.parameters]
    others_host_bytes, others_device_bytes = engine.held.other_optimizers_bytes()
    return Report(
        parameters=sum(p.numel() for p in parameters),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        layers=len(engine.layers),
        window=engine.window.size,
        resident=sum(h.resident for h in engine.layers),
        resident_root=sum(h.resident for h in engine.units if h.is_root),
        device=device.name,
        dtype=" and ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys([unit.dtype, *unit.dtypes])),
        states=optimizer.states if optimizer is not None else None,
        other_optimizers=tuple(sorted(map(name_of, engine.held.other_optimizers))),
        others_host_bytes=others_host_bytes,
        others_device_bytes=others_device_bytes,
        slots_device_bytes=engine.held.slots_bytes(),
        gradients_device_bytes=engine.held.gradient_slots_bytes(),
        root_device_bytes=engine.held.root_bytes,
        resident_device_bytes=engine.held.resident_bytes(),
        root_gradients_device_bytes=engine.held.root_gradient_bytes(),
        peak_device_bytes=device.peak_bytes(),
        pinned_host_bytes=device.pinned_bytes,
        pageable_host_bytes=device.pageable_bytes,
        process_host_bytes=engine.held.process_bytes,
        beside_host_bytes=engine.held.beside_bytes(),
        disk_bytes=engine.store.disk_bytes,
        disk_paths=tuple(map(str, engine.store.paths)),
        on_root_disk=any(path.stat().st_dev == os.stat("/").st_dev for path in engine.store.paths),
        accumulation_bytes=sum(
            h.gradients.sum_bytes() // (1 if h.is_root else h.replicas.local_world_size) for h in engine.units
        ),
        skipped_steps=optimizer.skipped_steps if optimizer is not None else 0,
        step=engine.stopwatch.last(),
        weights_on_disk=sum(unit.lives("weights") == "disk" for unit in engine.layers),
        states_on_disk=sum(unit.trainable and unit.lives("moments") == "disk" for unit in engine.layers),
    )
