"""A model's config.json: the model built from it without values, and the file written from a model.

It is transformers', or one of a class of the user's own that has ``config_dict(self)``, which returns what the file is
to hold, and a class method ``from_config_dict(settings)``, which makes a model of it.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stronghold.formats.kept_in_fp32 import keep_in_fp32

_GENERATION = "generation_config.json"


def build(
    file: Path,
    *,
    dtype: torch.dtype | None = None,
    model_class: Any = None,
    unquantised: bool = False,
    name: str | None = None,
) -> nn.Module:
    """Builds the model of a config.json with its parameters on the meta device and its buffers in memory.

    ``dtype`` is that of the parameters of a transformers model, by default the config's own, or fp32; what transformers
    keeps in fp32 beside 16 bits is fp32, as ``from_pretrained`` has it. ``model_class`` is one of transformers'
    classes, by default AutoModelForCausalLM, or one with ``from_config_dict``. A model whose weights are quantised is
    built as it was before with ``unquantised``, and refused without. ``name`` is the model's ``name_or_path``, which
    its adapters name as their base; by default the file's folder. Raises whatever transformers, or that, raises.
    """
    settings = json.loads(file.read_text(encoding="utf-8"))
    if (own := getattr(model_class, "from_config_dict", None)) is not None:
        with _parameters_on_meta():
            made: nn.Module = own(settings)
        return made
    try:
        kind = settings["model_type"]
    except KeyError as error:
        raise ValueError(f"no {error}") from error
    from transformers import CONFIG_MAPPING, AutoConfig

    if kind not in CONFIG_MAPPING:
        raise ValueError(f"transformers has no model_type {kind!r}, and no model_class with from_config_dict was given")
    config = AutoConfig.from_pretrained(str(file))
    config.name_or_path = str(file.parent) if name is None else name
    quantised = config.__dict__.pop("quantization_config", None) if unquantised else None
    model: Any = build_from_config(config, dtype=dtype, model_class=model_class)
    if quantised is not None:
        model.config.quantization_config = quantised  # as transformers' own has it
    return model  # type: ignore[no-any-return]


def build_from_config(config: Any, *, dtype: torch.dtype | None = None, model_class: Any = None) -> nn.Module:
    """Builds the model of a configuration of transformers, as :func:`build` does."""
    from transformers import AutoModelForCausalLM

    if getattr(config, "quantization_config", None):
        raise ValueError("quantised weights cannot be trained here; pass the model in float32 or bfloat16")
    build_from = getattr(model_class or AutoModelForCausalLM, "from_config", None) or model_class._from_config
    with _parameters_on_meta():
        model: nn.Module = build_from(config, dtype=dtype or config.dtype or torch.float32)
    keep_in_fp32(model)
    return model


def read_generation_config(model: nn.Module, folder: Path) -> None:
    """Has ``model`` generate as the generation_config.json of ``folder`` says, if there is one and it is one that does.

    Raises whatever transformers raises for a file that it cannot read.
    """
    if (folder / _GENERATION).is_file() and hasattr(model, "generation_config"):
        from transformers import GenerationConfig

        model.__dict__["generation_config"] = GenerationConfig.from_pretrained(str(folder), local_files_only=True)


def write_config(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """Writes config.json, and generation_config.json where the model has one, for weights of ``dtype``.

    A model that has neither a configuration of transformers nor ``config_dict`` has none, and nothing is written.
    """
    config: Any = getattr(model, "config", None)
    if (own := getattr(model, "config_dict", None)) is not None:
        (folder / "config.json").write_text(json.dumps(own(), indent=2) + "\n", encoding="utf-8")
    elif hasattr(config, "save_pretrained"):
        before = config.dtype, config.architectures
        config.dtype, config.architectures = str(dtype).removeprefix("torch."), [type(model).__name__]
        try:
            config.save_pretrained(str(folder))
        finally:
            config.dtype, config.architectures = before
        if (generation := getattr(model, "generation_config", None)) is not None:
            # What save_pretrained writes, which refuses a file of which transformers warned, once anything changed it.
            generation.to_json_file(str(folder / _GENERATION), keys_to_pop=["compile_config"])


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Has every module that is built leave its parameters, and not its buffers, on the meta device.

    As accelerate.init_empty_weights(include_buffers=False), but tied parameters stay tied.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            empty.__dict__.update(parameter.__dict__)
            parameter = empty
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
