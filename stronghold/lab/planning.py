"""`stronghold plan`: the settings of a run that is to be, what they take, and how long."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from stronghold.distributed.plan import plan
from stronghold.lab.finetuning.model import adapted_base
from stronghold.lab.finetuning.settings import AdapterSettings
from stronghold.lab.models.files import build_model, inputs_of, without_lacking
from stronghold.lab.models.gpt import GPT
from stronghold.lab.models.layered_gpt import LayeredGPT
from stronghold.lab.outputs import check_file, check_page
from stronghold.lab.page.plan import write_plan_page
from stronghold.lab.settings import ModelSettings, check_batch
from stronghold.planner.cards import BESIDE_CARD
from stronghold.planner.machine_file import MachineFile
from stronghold.planner.training_plan import TrainingPlan
from stronghold.settings import check_one_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What to plan; what is None is searched over, and the rest is as for ``stronghold.plan``.

    ``adapters`` None is for all weights. Of several ``processes`` stages and replicas are searched over, too; stages
    are of the reference GPT. ``tokens`` are those of which the table says how long they take. ``output`` is the file of
    the plan, ``picture`` the page with its timeline. Raises ValueError for values out of range and files that cannot be
    written.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    adapters: AdapterSettings | None = None
    batch: int = 4
    sequence: int = 1024
    dtype: str = "fp32"
    store: str | Sequence[str] = "ram"
    states: Sequence[str] = ("fp32",)
    update: str | None = None
    optimizer: str = "adamw"
    activations: int | str | None = None
    micro_batch: int | str | None = "auto"
    experts_per_part: int | str | None = None
    window: int | None = None
    resident: int | None = None
    device_memory: int | str | None = None
    host_memory: int | str | None = None
    cores: int | None = None
    processes: int = 1
    accumulate: int = 1
    tokens: int = 10**9
    output: str | None = None
    picture: str | None = None

    def __post_init__(self) -> None:
        if self.adapters is not None and self.model.path is None:
            raise ValueError(
                "adapters are planned for a model of transformers (got --lora or --adapter, and the reference GPT); "
                "pass MODEL, its folder or its config.json"
            )
        for name in ("batch", "sequence", "tokens", "processes", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more (got {getattr(self, name)}); pass a whole number")
        if (tokens := self.batch * self.sequence * self.accumulate) >= 2**63:
            raise ValueError(
                f"a step's tokens must be a number that 64 bits hold (got {tokens:,}, batch x sequence x accumulate); "
                "pass a smaller batch, or accumulate fewer"
            )
        check_one_of("dtype", self.dtype, tuple(DTYPES))
        for name, check in (("output", check_file), ("picture", check_page)):
            if (path := getattr(self, name)) is not None:
                check(name, path)


def plan_run(settings: PlanSettings, machine: MachineFile, console: Console) -> TrainingPlan:
    """Plans, prints the table, and writes what is to be written.

    Raises ValueError for a model or settings that cannot be planned for, BudgetError where nothing fits, OSError for a
    file that cannot be written.
    """
    check_batch(settings.batch, settings.sequence, machine.host_memory_bytes)  # planning takes time for each token, too
    model, name = _built(settings, machine)
    ids = torch.empty((settings.batch, settings.sequence), dtype=torch.int64, device="meta")
    found = plan(
        LayeredGPT(model) if settings.processes > 1 and isinstance(model, GPT) else model,
        machine=machine,
        sequence=settings.sequence,
        inputs=inputs_of(model, ids),
        dtype=None if settings.adapters else DTYPES[settings.dtype],  # the base's type is its own, adapters stay fp32
        store=settings.store,
        states=settings.states,
        update=settings.update,
        optimizer=settings.optimizer,
        activations=settings.activations,
        micro_batch=settings.micro_batch,
        experts_per_part=settings.experts_per_part,
        window=settings.window,
        resident=settings.resident,
        device_memory=settings.device_memory,
        host_memory=settings.host_memory,
        cores=settings.cores,
        tokens=settings.tokens,
        name=name,
        processes=settings.processes,
        accumulate=settings.accumulate,
    )
    if not machine.time:
        found = replace(found, assumed=[*found.assumed, BESIDE_CARD])
    console.print(found)
    if settings.output is not None:
        Path(settings.output).parent.mkdir(parents=True, exist_ok=True)
        found.write(settings.output)
        start = "stronghold"
        if found.processes > 1:
            start = f"torchrun --nproc-per-node {found.processes} -m stronghold"
        if found.processes > 1 and found.is_host:  # else torchrun gives each process one core
            start = f"OMP_NUM_THREADS={max(1, (settings.cores or machine.cores) // found.processes)} {start}"
        by_train = found.updated_by == "AdamW" and found.experts_per_part is None and found.accumulate == 1
        in_python = "offload(model, plan=…)" if found.processes == 1 else "replicate(model, **plan.settings)"
        train = f"{start} train --plan {shlex.quote(settings.output)}{_named(settings.model)}"
        by = train if by_train else f"stronghold.{in_python}"
        if settings.adapters is not None:
            alone = found.updated_by == "AdamW" and found.processes == 1
            by = f"{'stronghold finetune, which plans for itself, or ' if alone else ''}stronghold.{in_python}"
        if not machine.time:  # nobody has measured it
            by = "stronghold probe there, and a plan with what it writes"
        console.print(f"{settings.output}: the plan; to train by it: {by}", soft_wrap=True)
    if settings.picture is not None:
        notes = write_plan_page(
            settings.picture,
            model=found.model,
            machine=found.machine,
            rows=found.rows(),
            spans=found.spans,
            step_s=found.step_s.likely,
            accumulate=found.accumulate,
        )
        for note in notes:
            console.print(note, soft_wrap=True)
        console.print(f"{settings.picture}: its picture", soft_wrap=True)
    return found


def _built(settings: PlanSettings, machine: MachineFile) -> tuple[nn.Module, str]:
    path, adapters = settings.model.path, settings.adapters
    if path is None:
        gpt = GPT.from_config_dict(settings.model.config_dict(settings.sequence))
        return gpt, f"reference GPT, {settings.model.layers} layers of width {settings.model.hidden}"
    source = without_lacking(path)  # a plan asks for no weights
    if adapters is None:
        model, _, _ = build_model(source)
        return model, f"{type(model).__name__} of {path}"
    model = adapted_base(source, adapters, device=machine.device, dtype=settings.dtype, sequence=settings.sequence)
    base: Any = model.get_base_model()  # type: ignore[operator]
    kept = f" in {adapters.quantize}" if adapters.quantize else ""
    added = f"LoRA of {adapters.path}" if adapters.path else f"LoRA of rank {adapters.rank}"
    return model, f"{type(base).__name__} of {path}{kept}, {added}"


def _named(model: ModelSettings) -> str:
    """Returns the arguments of ``stronghold train`` that name ``model``."""
    if model.path is not None:
        return f" --model {shlex.quote(model.path)}"
    default = ModelSettings()
    shape = (name for name in vars(default) if name != "path" and getattr(model, name) != getattr(default, name))
    return "".join(f" --{name} {getattr(model, name)}" for name in shape)
