"""Models from local files: built without values, which their weights or an initialiser then give."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.models.gpt import GPT, GPTConfig
from stronghold.weights import Checkpoint, Weights, fill
from stronghold.weights.checkpoint import INDEX, SINGLE

_GPT_TYPE = "stronghold-gpt"


def load_model(path: str | Path) -> tuple[nn.Module, bool]:
    """Returns the causal language model at ``path`` in fp32, whole in memory, and whether its weights were read too.

    As :func:`build_model`, whose model it fills.
    """
    model, weights, with_weights = build_model(path)
    fill(model, weights)
    return model, with_weights


def build_model(path: str | Path) -> tuple[nn.Module, Weights | None, bool]:
    """Returns the causal language model at ``path`` in fp32 and in training mode, and what gives it its values.

    ``path`` is a folder with a config.json, or such a file alone: of the reference GPT, as stronghold.save writes it,
    or of transformers. The model's parameters are on the meta device; second comes what to pass to ``offload`` as
    ``weights``, the folder or, where it has no weights, an initialiser; third whether it has. Weights in
    another format than safetensors are read whole, and then the second is None. Nothing is fetched from a hub. Raises
    ValueError for anything else.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"a model must be a folder with a config.json, or that file (got {str(path)!r}); pass one")
    with_weights = path.is_dir() and any((path / name).is_file() for name in (SINGLE, INDEX))
    try:
        if not with_weights and path.is_dir() and any(path.glob("pytorch_model*.bin")):
            return _load_whole(path), None, True
        model = build(file, dtype=torch.float32).train()
        if with_weights:
            Checkpoint(path)
    except Exception as error:  # transformers raises all kinds for what it cannot read
        raise _no_model(path, error) from error
    return model, path if with_weights else initialiser_of(model), with_weights


def build(file: Path, *, dtype: torch.dtype | None = None, model_class: Any = None) -> nn.Module:
    """Builds the model of a config.json with its parameters on the meta device and its buffers in memory.

    ``dtype`` is that of the parameters of a transformers model, by default the config's own, or fp32, in which the
    reference GPT always is. ``model_class`` is one of transformers' classes, by default AutoModelForCausalLM. Raises
    whatever transformers raises.
    """
    settings = json.loads(file.read_text(encoding="utf-8"))
    try:
        kind = settings["model_type"]
    except KeyError as error:
        raise ValueError(f"no {error}") from error
    if kind == _GPT_TYPE:
        with torch.device("meta"):
            return GPT(GPTConfig(**{name: settings[name] for name in settings if name != "model_type"}))
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(file))
    if getattr(config, "quantization_config", None):
        raise ValueError("quantised weights cannot be trained here; pass the model in float32 or bfloat16")
    build_from = getattr(model_class or AutoModelForCausalLM, "from_config", None) or model_class._from_config
    with _parameters_on_meta():
        model: nn.Module = build_from(config, dtype=dtype or config.dtype or torch.float32)
    return model


def initialiser_of(model: nn.Module) -> Callable[[nn.Module], object]:
    """Returns what initialises the modules of ``model``, a reference GPT or a transformers model, one by one."""
    if isinstance(model, GPT):
        return model.initialize_module
    from transformers import PreTrainedModel

    # Each by the innermost model that it is a part of, as transformers itself does for models made of models.
    owners: dict[int, Any] = {}
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            owners.update((id(module), part) for module in part.modules())
    return lambda module: owners[id(module)]._init_weights(module)


def write_config(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """Writes config.json, and generation_config.json where the model has one, for weights of ``dtype``.

    A model that is neither the reference GPT nor of transformers has none, and nothing is written.
    """
    config: Any = getattr(model, "config", None)
    if isinstance(model, GPT):
        text = json.dumps({"model_type": _GPT_TYPE, **asdict(config)}, indent=2) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
    elif hasattr(config, "save_pretrained"):
        before = config.dtype, config.architectures
        config.dtype, config.architectures = str(dtype).removeprefix("torch."), [type(model).__name__]
        try:
            config.save_pretrained(str(folder))
        finally:
            config.dtype, config.architectures = before
        if (generation := getattr(model, "generation_config", None)) is not None:
            generation.save_pretrained(str(folder))


def inputs_of(model: nn.Module, batch: Tensor) -> dict[str, Any]:
    """Returns what ``model`` is called with to learn ``batch``, int64 (batch, sequence)."""
    inputs: dict[str, Any] = {"input_ids": batch, "labels": batch}
    if not isinstance(model, GPT):
        inputs["use_cache"] = False  # a cache of keys and values is for generation; training only pays for it
    return inputs


def vocabulary_of(model: nn.Module) -> int:
    """Returns how many ids ``model`` takes."""
    if isinstance(model, GPT):
        return model.config.separator + 1
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    return int(embeddings.num_embeddings)


def longest_sequence_of(model: nn.Module) -> int | None:
    """Returns the longest input that ``model`` takes, in tokens, or None where it does not say."""
    config: Any = model.config
    if isinstance(config, GPTConfig):
        return config.sequence
    return getattr(config.get_text_config(), "max_position_embeddings", None)


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


def _load_whole(path: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(str(path), local_files_only=True, dtype=torch.float32)
    return model.train()


def _no_model(path: str | os.PathLike[str], error: Exception) -> ValueError:
    problem = " ".join(str(error).split())[:300]
    return ValueError(
        f"a model must be a causal language model's files, as transformers or this program writes them "
        f"(got {str(path)!r}: {problem}); pass another, or mend its config.json"
    )
