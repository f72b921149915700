"""The model of a run: one of transformers from files, with PEFT's adapters if they are asked for, offloaded."""

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
from stronghold.lab.finetuning.settings import AdapterSettings, FinetuneSettings
from stronghold.lab.models.files import has_weights, longest_sequence_of
from stronghold.lab.models.gpt import MODEL_TYPE
from stronghold.unit import check_packed
from stronghold.weights import MAY_HOLD, exchange, give_values, unless_ignored

_COMPUTES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_base(
    path: str, *, adapters: AdapterSettings | None, dtype: str, sequence: int, without_weights: bool = False
) -> nn.Module:
    """Returns the model of the folder ``path``, in training mode, with its parameters on the meta device.

    They are fp32, and of a base that ``adapters`` leave as it is of the compute type ``dtype``, "fp32" or "bf16", or
    quantised as in its files. With ``without_weights`` there need be none beside the config.json, which ``path`` may be
    itself. Raises ValueError, naming the file, for a folder that is no such model, for weights that are of a type that
    nothing here computes with, or are quantised and asked to train, and for a ``sequence`` longer than the model takes.
    """
    folder = Path(path)
    file = folder / "config.json"
    if is_alone := without_weights and folder.is_file():
        folder, file = folder.parent, folder
    if not file.is_file():
        if (folder / ADAPTER_CONFIG).is_file():
            raise ValueError(
                f"a model is a folder with a config.json (got {path!r}, which holds adapters alone); pass "
                f"the model that they are of, and --adapter {path}"
            )
        raise ValueError(
            f"a model must be a folder with a config.json (got {path!r}); pass one, "
            "such as hf download NAME --local-dir FOLDER makes"
        )
    config = _read(file)
    if config.get("model_type") == MODEL_TYPE:
        raise ValueError(
            f"a model to fine-tune is one of transformers, which TRL trains (at {file}: the reference GPT); train it "
            "with stronghold train --model"
        )
    files = None if is_alone or (without_weights and not has_weights(folder)) else QuantisedFiles(folder)
    kept = {} if files is None else files.kept
    if config.get("quantization_config") or kept:
        _check_quantised(config, file, files, adapters)
    try:
        computed = _COMPUTES[dtype] if adapters else torch.float32
        model = build(file, dtype=computed, unquantised=bool(kept), name=path).train()
        read_generation_config(model, folder)
    except Exception as error:  # transformers raises all kinds for what it cannot read
        raise ValueError(
            f"a model must be one that transformers knows (at {file}: {' '.join(str(error).split())[:300]}); pass "
            "another, or mend its config.json"
        ) from error
    if files is not None:
        _check_types(model, files)
    if files is not None and kept:
        keep_quantised(model, files, config["quantization_config"])
    longest = longest_sequence_of(model)
    if longest is not None and sequence > longest:
        raise ValueError(
            f"a sequence must not be longer than the model takes (got --seq {sequence}, at {file}: {longest}"
            "); pass a shorter one"
        )
    return model


def adapted_base(path: str, adapters: AdapterSettings, *, device: str, dtype: str, sequence: int) -> nn.Module:
    """Returns the model at ``path`` with adapters as far as a plan needs it, on the meta device, by its config alone.

    Raises what :func:`build_base` raises, and ValueError for adapters that are not of this model, and for quantised
    weights that do not compute in its type on ``device``.
    """
    model = build_base(path, adapters=adapters, dtype=dtype, sequence=sequence, without_weights=True)
    _freeze(model, adapters, device=device, dtype=dtype, path=path)
    return add_adapters(model, adapters, seed=0).train()


def place(model: nn.Module, settings: FinetuneSettings, *, inputs: dict[str, Any] | None) -> nn.Module:
    """Returns ``model`` offloaded, with adapters if there are to be some; its weights are read layer by layer.

    ``inputs`` are what it is planned for, None for the settings as they are. Raises what ``offload`` raises, and
    ValueError for adapters that are not of this model, and for quantised weights that do not compute in its type.
    """
    dtype = torch.bfloat16 if settings.dtype == "bf16" else None
    if settings.adapters is not None:
        dtype = None  # the base's type is its own, adapters stay fp32
        _freeze(model, settings.adapters, device=settings.device, dtype=settings.dtype, path=settings.model)
        with _weightless(model):
            model = add_adapters(model, settings.adapters, seed=settings.seed)
        unmark_quantised(model)  # the optimizer, which would do so, comes behind TRL's trainer
    given = {
        name: value for name, value in vars(settings.offload).items() if inputs is None or value not in _OPEN[name]
    } | {"accumulate": settings.accumulate, "states": settings.course.states}
    given["update"] = None if settings.update == "auto" else settings.update
    return offload(
        model,
        device=settings.device,
        dtype=dtype,
        experts_per_part=settings.experts_per_part,
        weights=settings.model,
        inputs=inputs,
        **given,
    )


def _freeze(model: nn.Module, adapters: AdapterSettings, *, device: str, dtype: str, path: str) -> None:
    """Has ``model`` be what adapters are trained beside: quantised if that is asked for, and without gradients."""
    if adapters.quantize is not None:
        quantise(model, adapters.quantize)
    try:
        check_packed(model.requires_grad_(False), torch.device(device), _COMPUTES[dtype])
    except ValueError as error:
        raise ValueError(f"a quantised base must compute in --dtype (got {dtype}, at {path}: {error})") from error


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
    "update": (None,),
    "states": (None,),
    "compile": (),
}
"""What of the settings leaves it to the planner."""


def _check_quantised(
    config: dict[str, Any], file: Path, files: QuantisedFiles | None, adapters: AdapterSettings | None
) -> None:
    kind = config.get("quantization_config")
    kind = kind.get("quant_method", "some") if isinstance(kind, dict) else "no"
    if files is None or kind not in METHODS or not files.kept:
        found = 0 if files is None else len(files.kept)
        raise ValueError(
            "weights that are quantised in their files can be read where they are bitsandbytes' or torchao's (at "
            f"{file}: a quantization_config of {kind}, and {found} such weights beside it); "
            "pass its folder, or the model in float32 or bfloat16, and --quantize with --lora"
        )
    name, kept = next(iter(files.kept.items()))
    where = files.entries[name if name in files.entries else next(iter(kept.parts.values()))].file
    if adapters is None:
        raise ValueError(
            f"quantised weights cannot be trained (at {where}: {name} is {kept.kind}); pass --lora to train adapters "
            "beside them, or the model in float32 or bfloat16"
        )
    if adapters.quantize is not None:
        raise ValueError(
            f"--quantize is for weights in 16 or 32 bits (got {adapters.quantize}, at {where}: {name} is "
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
