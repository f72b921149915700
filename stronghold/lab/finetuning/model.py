"""The model of a run: a local folder of transformers, with PEFT's adapters if they are asked for, offloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.checkpoint.adapters import CONFIG as ADAPTER_CONFIG
from stronghold.checkpoint.kept_weights import METHODS, keep_quantised
from stronghold.checkpoint.quantising import quantise
from stronghold.engine import offload, report
from stronghold.engine.offload import known_engine
from stronghold.engine.taking_in import unmark_quantised
from stronghold.formats.model_config import build, read_generation_config
from stronghold.formats.quantised_files import QuantisedFiles
from stronghold.lab.finetuning.adapters import add_adapters
from stronghold.lab.finetuning.settings import FinetuneSettings
from stronghold.lab.models.files import longest_sequence_of
from stronghold.lab.models.gpt import MODEL_TYPE
from stronghold.unit import check_packed
from stronghold.weights import MAY_HOLD, exchange, give_values, unless_ignored

_COMPUTES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_base(settings: FinetuneSettings) -> nn.Module:
    """Returns the model of ``settings.model``, in training mode, with its parameters on the meta device.

    They are fp32, and of a base that adapters leave as it is of the compute type, or quantised as in its files. Raises
    ValueError, naming the file, for a folder that is no such model, for weights that are of a type that nothing here
    computes with, or are quantised and asked to train, and for a sequence longer than the model takes.
    """
    folder = Path(settings.model)
    file = folder / "config.json"
    if not file.is_file():
        if (folder / ADAPTER_CONFIG).is_file():
            raise ValueError(
                f"a model is a folder with a config.json (got {settings.model!r}, which holds adapters alone); pass "
                f"the model that they are of, and --adapter {settings.model}"
            )
        raise ValueError(
            f"a model must be a folder with a config.json (got {settings.model!r}); pass one, "
            "such as hf download NAME --local-dir FOLDER makes"
        )
    config = _read(file)
    if config.get("model_type") == MODEL_TYPE:
        raise ValueError(
            f"a model to fine-tune is one of transformers, which TRL trains (at {file}: the reference GPT); train it "
            "with stronghold train --model"
        )
    files = QuantisedFiles(folder)
    if config.get("quantization_config") or files.kept:
        _check_quantised(config, files, settings)
    try:
        dtype = _COMPUTES[settings.dtype] if settings.adapters else torch.float32
        model = build(file, dtype=dtype, unquantised=bool(files.kept), name=settings.model).train()
        read_generation_config(model, folder)
    except Exception as error:  # transformers raises all kinds for what it cannot read
        raise ValueError(
            f"a model must be one that transformers knows (at {file}: {' '.join(str(error).split())[:300]}); pass "
            "another, or mend its config.json"
        ) from error
    _check_types(model, files)
    if files.kept:
        keep_quantised(model, files, config["quantization_config"])
    longest = longest_sequence_of(model)
    if longest is not None and settings.sequence > longest:
        raise ValueError(
            f"a sequence must not be longer than the model takes (got --seq {settings.sequence}, at {file}: {longest}"
            "); pass a shorter one"
        )
    return model


def place(model: nn.Module, settings: FinetuneSettings, *, inputs: dict[str, Any] | None) -> nn.Module:
    """Returns ``model`` offloaded, with adapters if there are to be some; its weights are read layer by layer.

    ``inputs`` are what it is planned for, None for the settings as they are. Raises what ``offload`` raises, and
    ValueError for adapters that are not of this model, and for quantised weights that do not compute in its type.
    """
    dtype = torch.bfloat16 if settings.dtype == "bf16" else None
    if settings.adapters is not None:
        dtype = None  # the base's type is its own, adapters stay fp32
        if settings.adapters.quantize is not None:
            quantise(model, settings.adapters.quantize)
        try:
            check_packed(model.requires_grad_(False), torch.device(settings.device), _COMPUTES[settings.dtype])
        except ValueError as error:
            raise ValueError(
                f"a quantised base must compute in --dtype (got {settings.dtype}, at {settings.model}: {error})"
            ) from error
        with _weightless(model):
            model = add_adapters(model, settings.adapters, seed=settings.seed)
        unmark_quantised(model)  # the optimizer, which would do so, comes behind TRL's trainer
    given = {
        name: value for name, value in vars(settings.offload).items() if inputs is None or value not in _OPEN[name]
    } | {"accumulate": settings.accumulate}
    return offload(
        model,
        device=settings.device,
        dtype=dtype,
        experts_per_part=settings.experts_per_part,
        weights=settings.model,
        inputs=inputs,
        **given,
    )


def settled(model: nn.Module, settings: FinetuneSettings) -> FinetuneSettings:
    """Returns ``settings`` with what of them decides which numbers are learned as ``model``, placed by them, has it."""
    engine = known_engine(model)
    offload = replace(settings.offload, micro_batch=engine.micro_batch, activations=engine.compiling.activations)
    return replace(settings, offload=offload, experts_per_part=report(model).experts_per_part)


_OPEN: dict[str, tuple[Any, ...]] = {
    "window": ("auto",),
    "store": (),
    "micro_batch": (None, "auto"),
    "activations": ("auto",),
    "resident": ("auto",),
    "device_memory": (None,),
    "host_memory": (None,),
    "accumulate": (None,),
    "compile": (),
}
"""What of the settings leaves it to the planner."""


def _check_quantised(config: dict[str, Any], files: QuantisedFiles, settings: FinetuneSettings) -> None:
    kind = config.get("quantization_config")
    kind = kind.get("quant_method", "some") if isinstance(kind, dict) else "no"
    if kind not in METHODS or not files.kept:
        raise ValueError(
            "weights that are quantised in their files can be read where they are bitsandbytes' or torchao's (at "
            f"{files.directory / 'config.json'}: a quantization_config of {kind}, and {len(files.kept)} such weights); "
            "pass the model in float32 or bfloat16, and --quantize with --lora"
        )
    name, kept = next(iter(files.kept.items()))
    where = files.entries[name if name in files.entries else next(iter(kept.parts.values()))].file
    if settings.adapters is None:
        raise ValueError(
            f"quantised weights cannot be trained (at {where}: {name} is {kept.kind}); pass --lora to train adapters "
            "beside them, or the model in float32 or bfloat16"
        )
    if settings.adapters.quantize is not None:
        raise ValueError(
            f"--quantize is for weights in 16 or 32 bits (got {settings.adapters.quantize}, at {where}: {name} is "
            f"{kept.kind}); leave it out"
        )


def _check_types(model: nn.Module, files: QuantisedFiles) -> None:
    other = [
        name
        for name in files.entries
        if name.rsplit(".", 1)[-1] in ("weight", "bias") and not (files.is_floating(name) or files.is_kept(name))
    ]
    for name in unless_ignored(model, other, MAY_HOLD):  # causal masks were once saved as attention.bias
        entry = files.entries[name]
        raise ValueError(
            f"weights must be of a type that is computed with here, float32, bfloat16 or float16 (at {entry.file}: "
            f"{name} is {entry.dtype}); convert the model, or pass it in one of them"
        )


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(config, dict):
            return config
        problem = f"it is a {type(config).__name__}"
    except (OSError, ValueError) as error:
        problem = str(error)
    raise ValueError(f"a model's config.json must be one that can be read (at {file}: {problem}); mend it")


@contextmanager
def _weightless(model: nn.Module) -> Iterator[None]:
    """Has the parameters of ``model`` on the CPU, each as one number, while PEFT looks at them; they are objects as
    before on the meta device afterwards.

    On the meta device PEFT would put the adapters there, too, and their values would be lost.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.is_meta]
    for parameter in parameters:
        number: Tensor = torch.zeros((), dtype=parameter.dtype)
        give_values(parameter, number.expand(parameter.shape))
    try:
        yield
    finally:
        for parameter in parameters:
            empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            exchange(parameter, empty)
