"""Checkpoints with random weights, as hubs have them, of models that no memory has to hold whole. No benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def write_checkpoint(folder: Path, config: Any, model: torch.nn.Module) -> None:
    """Writes bf16 weights of ``model``, which is on the meta device, and ``config``: a layer in a file.

    Matrices are normal numbers of the config's ``initializer_range``, vectors ones; stacked experts of transformers
    come apart. No more than one layer is in memory.
    """
    folder.mkdir(parents=True)
    parts: dict[str, dict[str, torch.Size]] = {}
    for name, parameter in model.named_parameters():
        number = name.split(".layers.")[1].split(".")[0] if ".layers." in name else "root"
        parts.setdefault(number, {}).update(_in_files(name, parameter.shape))
    index: dict[str, str] = {}
    for number, shapes in parts.items():
        file = f"model-{number}.safetensors"
        values = {
            name: torch.ones(shape, dtype=torch.bfloat16)
            if len(shape) == 1
            else torch.empty(shape, dtype=torch.bfloat16).normal_(0, config.initializer_range)
            for name, shape in shapes.items()
        }
        save_file(values, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(values, file))
        print(f"written {file}", flush=True)
    whole = {"metadata": {"total_size": 2 * sum(p.numel() for p in model.parameters())}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(whole))
    config.save_pretrained(folder)


def _in_files(name: str, shape: torch.Size) -> Iterator[tuple[str, torch.Size]]:
    """Yields the tensors that a parameter is in files."""
    prefix, _, kind = name.rpartition(".experts.")
    if not prefix:
        yield name, shape
        return
    count, rows, columns = shape
    for expert in range(count):
        if kind == "gate_up_proj":
            for of in ("gate_proj", "up_proj"):
                yield f"{prefix}.experts.{expert}.{of}.weight", torch.Size((rows // 2, columns))
        else:
            yield f"{prefix}.experts.{expert}.{kind}.weight", torch.Size((rows, columns))
