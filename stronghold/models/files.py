"""Models from local files, and back to files."""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.models.gpt import GPT, GPTConfig

_GPT_TYPE = "stronghold-gpt"
_WEIGHTS = "model.safetensors"


def load_model(path: str | Path) -> tuple[nn.Module, bool]:
    """Returns the causal language model at ``path`` in fp32, and whether its weights were read too.

    ``path`` is a folder with a config.json, or such a file alone: of the reference GPT, as save_model writes
    it, or of transformers. Without weights the model is initialised anew. Nothing is fetched from a hub.
    Raises ValueError for anything else.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"a model must be a folder with a config.json, or that file (got {str(path)!r}); pass one")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        kind = config["model_type"]
        if kind == _GPT_TYPE:
            return _load_gpt(config, path / _WEIGHTS)
        return _load_transformers(path, file)
    except Exception as error:  # transformers raises all kinds for what it cannot read
        problem = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:300]
        raise ValueError(
            f"a model must be a causal language model's files, as transformers or this program writes them "
            f"(got {str(path)!r}: {problem}); pass another, or mend its config.json"
        ) from error


def save_model(model: nn.Module, folder: str | Path) -> None:
    """Writes weights and configuration into ``folder``, which appears, or is replaced, only when complete.

    They are written to a folder beside it first. transformers models are written by their own
    ``save_pretrained``. Raises OSError, naming the folder, where it cannot be written.
    """
    folder = Path(folder)
    check_save_folder(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    replaced = folder.with_name(f".{folder.name}.replaced")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(model, partial)
        for written in partial.iterdir():
            _sync(written)
        _sync(partial)
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)
        partial.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
        _sync(folder.parent)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)  # what is there is no model, and may fill the disk
        # safetensors reports a failed write as an exception of its own, with the system's words in it
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        number = error.errno if isinstance(error, OSError) else None
        raise OSError(number, f"cannot save the model ({reason})", str(folder)) from error


def check_save_folder(folder: str | Path) -> None:
    """Raises ValueError if ``folder`` holds something other than a model, which saving would replace."""
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and ((folder / "config.json").is_file() or not any(folder.iterdir()))):
        raise ValueError(
            f"a folder to save in must be new, empty or hold a model with its config.json (got {str(folder)!r}); "
            "pass another"
        )


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


def _load_gpt(config: dict[str, Any], weights: Path) -> tuple[GPT, bool]:
    model = GPT(GPTConfig(**{name: value for name, value in config.items() if name != "model_type"}))
    if not weights.is_file():
        return model, False
    from safetensors.torch import load_model as load_weights

    load_weights(model, weights)
    return model, True


def _load_transformers(path: Path, file: Path) -> tuple[nn.Module, bool]:
    from transformers import AutoConfig, AutoModelForCausalLM

    with_weights = path.is_dir() and any(any(path.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin"))
    model: nn.Module
    if with_weights:
        model = AutoModelForCausalLM.from_pretrained(str(path), local_files_only=True, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(file)), dtype=torch.float32)
    return model.train(), with_weights


def _write(model: nn.Module, folder: Path) -> None:
    if not isinstance(model, GPT):
        model.save_pretrained(str(folder))  # type: ignore[operator]
        return
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, str(folder / _WEIGHTS), metadata={"format": "pt"})
    config = {"model_type": _GPT_TYPE, **asdict(model.config)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
