"""`stronghold partition`: a model's layers measured, cut into stages, and what comes of it as a table."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from stronghold.distributed.layered_model import LayeredModel, LayeredSequential
from stronghold.distributed.measuring import measure
from stronghold.distributed.offloaded_layers import machine_known, offloaded_stages
from stronghold.distributed.table import partition_lines, partition_table, sizes_of
from stronghold.lab.models.gpt import GPT
from stronghold.lab.models.layered_gpt import LayeredGPT
from stronghold.lab.outputs import check_apart, check_file
from stronghold.lab.settings import ModelSettings
from stronghold.planner.machine_rates import messages_s
from stronghold.planner.partition import Partition, partition
from stronghold.planner.partition_file import PartitionFile, read_partition, write_partition
from stronghold.planner.pipeline_order import Pipeline
from stronghold.planner.stage_costs import LayerCost
from stronghold.units import format_count, format_seconds, parse_bytes

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_NOTHING = LayerCost(forward_s=0, backward_s=0, weight_bytes=0, activation_bytes=0, input_bytes=0)


@dataclass(frozen=True, kw_only=True)
class PartitionSettings:
    """What to cut into stages, and how.

    ``model`` is ``module:attribute``, an nn.Sequential or a function without arguments that returns one, and ``sample``
    the shape of one of its samples; without it the reference GPT of ``shape``, with ``sequence`` tokens in a sample.
    ``balance`` is "time", "memory" or the layers of each stage, and ``file`` a partition to be judged in its place.
    ``activations`` is "recompute" or "keep" for all layers; without it as few are recomputed as fit ``memory``, which
    is what weights and activations of a stage may take, in bytes or like "8GiB". With a ``window`` that is the device's
    part of them, and fetches and updates count where ``machine``, a file of stronghold probe's, or what is kept of this
    machine, has their rates, which all processes have in common. ``batch`` is the samples of a step, by
    default one for each micro-batch. ``output`` is the file to write. Raises ValueError for values that contradict one
    another, and for files that cannot be.
    """

    model: str | None = None
    shape: ModelSettings = field(default_factory=ModelSettings)
    sample: tuple[int, ...] | None = None
    stages: int | None = None
    processes: int | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    balance: str | tuple[int, ...] | None = None
    file: str | None = None
    activations: str | None = None
    memory: int | str | None = None
    window: int | None = None
    machine: str | None = None
    batch: int | None = None
    sequence: int = 1024
    dtype: str = "fp32"
    device: str = "cpu"
    output: str | None = None

    def __post_init__(self) -> None:
        for name in (
            "stages",
            "processes",
            "micro_batches",
            "window",
            "batch",
            "sequence",
            *(["sample"] if self.sample else []),
        ):
            value = getattr(self, name)
            if value is not None and min([value] if isinstance(value, int) else value) < 1:
                raise ValueError(f"{name} must be 1 or more (got {value}); pass whole numbers")
        if (self.model is None) != (self.sample is None):
            raise ValueError(
                "a model that is named needs the shape of a sample, and the reference GPT has its own (got "
                f"model={self.model!r}, input={self.sample}); pass both, such as shop:resnet and 3,224,224, or neither"
            )
        if self.file is not None and (self.balance is not None or self.activations is not None):
            raise ValueError(
                f"a partition's file says where the row is cut and what is recomputed (got file={self.file!r} with "
                f"balance={self.balance!r}, activations={self.activations!r}); leave out one or the other"
            )
        if self.machine is not None and self.window is None:
            raise ValueError(
                f"a machine's rates are those of fetches and updates beside a window (got machine={self.machine!r} and "
                "no window); pass a window, such as 2, or no machine"
            )
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device must be cpu, cuda or cuda:N (got {self.device!r}); pass one of them")
        if self.device != "cpu" and not torch.cuda.is_available():
            raise ValueError(f"device {self.device!r} needs a GPU and a CUDA build of torch (got none); pass 'cpu'")
        if self.memory is not None:
            object.__setattr__(self, "memory", parse_bytes(self.memory))
        if self.output is not None:
            if not Path(self.output).absolute().parent.is_dir():
                raise ValueError(f"output must be a file in a folder that is there (got {self.output!r}); pass another")
            check_file("output", self.output)
            check_apart([("output", self.output)], inputs=[("machine", self.machine), ("file", self.file)])


def partition_model(settings: PartitionSettings, console: Console) -> Partition:
    """Measures the layers of a model, cuts them into stages, and prints what comes of it.

    Raises ValueError for a model that is not to be had and a partition that does not fit it, before anything is
    measured; ParallelError for a model that is no row of layers or cannot compute its inputs; BudgetError where nothing
    fits the memory; OSError for a file that cannot be written.
    """
    file = None if settings.file is None else read_partition(settings.file)
    balance = settings.balance or "time" if file is None else file.partition
    device, dtype = torch.device(settings.device), _DTYPES[settings.dtype]
    machine = machine_known(settings.machine, device)
    pipeline, batch = _pipeline(settings, balance)
    samples = batch // pipeline.micro_batches
    layered, inputs, targets, told = _layered(settings, samples)
    partition([_NOTHING] * len(layered.layers), pipeline, balance=balance)
    console.print(told, soft_wrap=True, highlight=False, markup=False)
    offloaded = None
    if settings.window is not None:
        offloaded = offloaded_stages(
            layered, settings.window, device=device, dtype=dtype, machine=machine, processes=pipeline.devices
        )
        rates = "no rates of its machine known" if machine is None else f"rates of {machine.device_name}"
        console.print(f"window     of {settings.window}, {rates}", soft_wrap=True, highlight=False, markup=False)
    costs = _measured(layered, inputs, targets, settings, console)
    wanted: dict[str, Any] = {
        "memory_bytes": settings.memory,
        "recompute_ratio": _ratio(settings, file),
        "receive_buffers": True,  # torch.distributed.pipelining allocates them
        "offloaded": offloaded,
    }
    found = partition(costs, pipeline, balance=balance, **wanted)
    console.print(partition_table(found, pipeline))
    link_s = messages_s(machine, [costs[stage.first].input_bytes for stage in found.stages[1:]])
    for line in partition_lines(found, pipeline, link_s):
        console.print(line, soft_wrap=True, highlight=False)
    if balance != "time":
        near = None if isinstance(balance, str) else balance
        best = partition(costs, pipeline, balance="time", near=near, **wanted)
        console.print(
            f"fastest    {sizes_of(best)}: {format_seconds(best.slowest_s)} for a micro-batch",
            soft_wrap=True,
            highlight=False,
        )
    if settings.output is not None:
        write_partition(settings.output, found)
        console.print(f"written    {settings.output}", soft_wrap=True, highlight=False, markup=False)
    return found


def _pipeline(settings: PartitionSettings, balance: str | Sequence[int]) -> tuple[Pipeline, int]:
    """Returns the pipeline that is planned for, and the samples of a step."""
    stages = settings.stages or (None if isinstance(balance, str) else len(balance))
    if stages is None:
        raise ValueError("a row of layers is cut into a number of stages (got none); pass --stages, such as 4")
    processes = settings.processes or stages
    if stages % processes:
        raise ValueError(
            f"the processes must divide the stages (got {processes} for {stages} stages); pass as many as divide them"
        )
    batch, micro_batches = settings.batch, settings.micro_batches
    if micro_batches is None:
        most = 4 * stages  # with as many the bubble is small (Huang et al., GPipe, 2019)
        micro_batches = most if batch is None else max(n for n in range(1, most + 1) if batch % n == 0)
    batch = micro_batches if batch is None else batch
    if batch % micro_batches:
        raise ValueError(
            f"the micro-batches must divide the batch (got a batch of {batch} samples and {micro_batches} "
            f"micro-batches); pass a batch of a multiple of {micro_batches}"
        )
    a_device = stages // processes
    schedule = settings.schedule or ("1F1B" if a_device == 1 else "Interleaved1F1B")
    return (
        Pipeline(schedule=schedule, devices=processes, micro_batches=micro_batches, stages_per_device=a_device),
        batch,
    )


def _layered(settings: PartitionSettings, samples: int) -> tuple[LayeredModel, Tensor, Tensor | None, str]:
    """Returns the row of layers, a micro-batch of random inputs and, where there is a loss, targets; and what to say.

    That is for when nothing refuses them any more: it says what is measured.
    """
    generator = torch.Generator().manual_seed(0)
    if settings.model is None:
        shape = settings.shape
        gpt = GPT.from_config_dict(shape.config_dict(settings.sequence))
        ids = torch.randint(shape.vocabulary, (samples, settings.sequence), generator=generator)
        named, sample, loss = f"reference GPT of width {shape.hidden}", f"{settings.sequence} tokens", "with the loss"
        layered: LayeredModel = LayeredGPT(gpt)
        inputs, targets = ids, ids
    else:
        assert settings.sample is not None
        layered = LayeredSequential(_named(settings.model).train(), _no_loss)
        named, sample, loss = settings.model, " x ".join(map(str, settings.sample)), "without a loss"
        inputs, targets = _random(layered.model, (samples, *settings.sample), _DTYPES[settings.dtype], generator), None
    parameters = sum(parameter.numel() for parameter in layered.model.parameters())
    told = (
        f"model      {named}: {len(layered.layers)} layers, {format_count(parameters)} parameters\n"
        f"measured   {samples} x {sample} in a micro-batch, {loss}, {settings.dtype} on {settings.device}"
    )
    return layered, inputs, targets, told


def _named(name: str) -> nn.Sequential:
    """Returns the model that ``module:attribute`` names, found as ``python -m`` finds modules."""
    module, colon, attribute = name.partition(":")
    if not colon or Path(name).exists():
        raise ValueError(
            "a model to be cut is the reference GPT, or is named as module:attribute, an nn.Sequential or a function "
            f"that returns one (got {name!r}); folders of transformers models cannot be cut into stages"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"a model's name must be module:attribute (got {name!r}, and: {error}); name a module that can be imported "
            "from here, and what it has"
        ) from error
    built = found if isinstance(found, nn.Module) or not callable(found) else found()
    if not isinstance(built, nn.Sequential):
        raise ValueError(
            f"stages are cut out of an nn.Sequential, or what a function without arguments returns as one (got "
            f"{type(built).__name__} from {name!r}); write the model as nn.Sequential(...) of its parts"
        )
    return built


def _random(model: nn.Module, shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Returns ids where the first module with parameters is an embedding, else normal numbers."""
    first = next((module for module in model.modules() if module._parameters), None)
    if isinstance(first, nn.Embedding):
        return torch.randint(first.num_embeddings, shape, generator=generator)
    return torch.randn(*shape, dtype=dtype, generator=generator)


def _no_loss(output: Tensor, targets: Tensor) -> Tensor:
    raise AssertionError("a named model has no targets")


def _measured(
    layered: LayeredModel, inputs: Tensor, targets: Tensor | None, settings: PartitionSettings, console: Console
) -> list[LayerCost]:
    columns = (TextColumn("measuring layers"), MofNCompleteColumn(), BarColumn(bar_width=20), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as shown:
        task = shown.add_task("", total=len(layered.layers))
        return measure(
            layered,
            inputs,
            targets,
            device=torch.device(settings.device),
            dtype=_DTYPES[settings.dtype],
            progress=lambda done, count: shown.update(task, completed=done, total=count),
        )


def _ratio(settings: PartitionSettings, file: PartitionFile | None) -> float | list[float] | None:
    if file is not None:
        return list(file.recompute_ratio)
    return {None: None, "keep": 0.0, "recompute": 1.0}[settings.activations]
