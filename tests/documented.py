"""What the code on pages may take for granted: a model, data, and a machine with a GPU and a disk at /mnt/nvme.

Where there is no GPU, ``device="cuda"`` is the CPU; /mnt is a folder of the test's. Holds no tests.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import stronghold
from tests.planner.machines import laptop
from tests.tools.text import texts, tokenizer

CONFIG = transformers.Qwen3Config(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=32,
)


def build() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(CONFIG)
    return model


def samples(count: int) -> list[dict[str, Any]]:
    torch.manual_seed(1)
    return [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (count, 8))]


def elsewhere(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Returns a batch that is not where the model computes, as a loader's for a GPU: ``to`` of ``here`` moves it."""
    collated = torch.utils.data.default_collate(batch)
    moved = {name: value.to("meta") for name, value in collated.items()}
    for name, value in collated.items():
        moved[name].__dict__["values"] = value
    return moved


def example(name: str) -> types.ModuleType:
    """Returns a program of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def namespace(folder: Path) -> dict[str, Any]:
    """Returns the names that every page has; what it reads lies in ``folder``."""
    build().save_pretrained(folder / "Qwen3-8B")
    laptop().write(folder / "workstation.json")
    return {
        "F": F,
        "accelerate": accelerate,
        "arguments": transformers.TrainingArguments(
            output_dir=str(folder / "out"),
            max_steps=2,
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            save_steps=1,
        ),
        "build": build,
        "config": CONFIG,
        "data": samples(16),
        "flux": example("flux"),
        "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
        "loader": torch.utils.data.DataLoader(samples(8), batch_size=4, collate_fn=elsewhere),  # type: ignore[arg-type]
        "math": math,
        "model": build(),
        "nn": nn,
        "peft": peft,
        "scheduler": types.SimpleNamespace(step=lambda: None),
        "stronghold": stronghold,
        "texts": texts(),
        "tokenizer": tokenizer(),
        "torch": torch,
        "transformers": transformers,
    }


def in_stages() -> dict[str, Any]:
    """Returns the names of a page's pipeline: a row of layers, and batches of inputs and targets."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)))
    x, y = torch.randn(2, 16, 8), torch.randint(8, (2, 16))
    return {"model": model, "x": x[0], "loader": list(zip(x, y, strict=True))}


def here(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Makes this machine the one that the pages speak of, for as long as ``monkeypatch`` lasts."""

    def place(value: Any) -> Any:
        if isinstance(value, str | os.PathLike) and os.fspath(value).startswith("/mnt/"):
            return str(folder / os.fspath(value).removeprefix("/"))
        return [place(one) for one in value] if isinstance(value, list) else value

    def patch(owner: Any, name: str, *, device: bool) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if device and not torch.cuda.is_available() and kwargs.get("device", "cuda") == "cuda":
                kwargs["device"] = "cpu"
            return function(*map(place, args), **{key: place(value) for key, value in kwargs.items()})

        monkeypatch.setattr(owner, name, call)

    for name in ("offload", "load", "replicate", "pipeline"):
        patch(stronghold, name, device=True)
    for name in ("save", "load", "newest"):
        patch(stronghold.checkpoint, name, device=False)
    to = torch.Tensor.to

    def move(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        where = ["cpu" if one == "cuda" and not torch.cuda.is_available() else one for one in args]
        return to(tensor.__dict__.get("values", tensor), *where, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", move)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder / "home"))  # a probe's file there is no other test's machine


def main(page: Path, number: int) -> None:
    """Runs one block of a page, in each of the processes that torchrun has started."""
    block = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)[number]
    names = {"stronghold": stronghold, "torch": torch, "F": F}
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        here(patch, Path(folder))
        if "pipeline" in block:
            names |= in_stages()
        else:
            names |= {"model": build(), "loader": torch.utils.data.DataLoader(samples(8), batch_size=4)}  # type: ignore
        exec(compile(block, str(page), "exec"), names)
    assert not any(parameter.isnan().any() for parameter in names["model"].parameters())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
