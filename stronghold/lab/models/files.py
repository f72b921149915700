"""Models from local files: built without values, which their weights or an initialiser then give."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.formats.model_config import build, read_generation_config
from stronghold.formats.weight_files import INDEX, SINGLE, WeightFiles
from stronghold.lab.models.gpt import GPT, MODEL_TYPE, GPTConfig
from stronghold.weights import Weights, fill


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
    with_weights = has_weights(path)
    try:
        if not with_weights and path.is_dir() and any(path.glob("pytorch_model*.bin")):
            return _load_whole(path), None, True
        model = build(file, dtype=torch.float32, model_class=_class_of(file)).train()
        if path.is_dir():
            read_generation_config(model, path)
        if with_weights:
            WeightFiles(path)
    except Exception as error:  # transformers raises all kinds for what it cannot read
        raise _no_model(path, error) from error
    return model, path if with_weights else initialiser_of(model), with_weights


def has_weights(path: Path) -> bool:
    """Whether ``path`` is a folder with weights in safetensors."""
    return path.is_dir() and any((path / name).is_file() for name in (SINGLE, INDEX))


def without_lacking(path: str) -> str:
    """Returns ``path``, or its config.json where it is a folder of which not all weights have been downloaded."""
    index, config = Path(path, INDEX), Path(path, "config.json")
    if not (index.is_file() and config.is_file()):
        return path
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return path if all(Path(path, file).is_file() for file in files) else str(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return path  # what reads it says what is wrong


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


def _class_of(file: Path) -> type[GPT] | None:
    """Returns the reference GPT where a config.json is of one; else transformers knows."""
    settings = json.loads(file.read_text(encoding="utf-8"))
    return GPT if isinstance(settings, dict) and settings.get("model_type") == MODEL_TYPE else None


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
