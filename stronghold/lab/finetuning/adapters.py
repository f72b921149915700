"""PEFT's adapters around a model: new ones, or those of a folder, which must be of this model."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stronghold.checkpoint.adapters import CONFIG
from stronghold.lab.finetuning.settings import AdapterSettings

WEIGHTS = "adapter_model.safetensors"


def add_adapters(model: nn.Module, settings: AdapterSettings, *, seed: int) -> nn.Module:
    """Returns a PeftModel around ``model``, whose parameters are frozen; the adapters' are fp32, on the CPU.

    New ones are drawn from ``seed``, as SFTTrainer draws them. Raises ValueError where no layer has one of the
    ``targets`` for its name, and for a folder whose adapters are not of this model, or are of another kind than LoRA.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    torch.manual_seed(seed)
    if settings.path is not None:
        return _loaded(model, Path(settings.path))
    targets: Any = list(settings.targets)
    alpha: Any = settings.alpha  # PEFT's annotation has whole numbers; it scales by any
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=settings.rank,
        lora_alpha=alpha,
        lora_dropout=settings.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
    )
    names = [f".{name}" for name, _ in model.named_modules()]
    lost = [target for target in targets if not any(name.endswith(f".{target}") for name in names)]
    if lost and targets != ["all-linear"]:
        raise ValueError(
            f"adapters go to linear layers of the model (got --targets {','.join(targets)}, and no layer is called "
            f"{' or '.join(lost)}); pass names of its layers, or all-linear"
        )
    try:
        adapted: nn.Module = get_peft_model(model, config)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(
            f"adapters go to linear layers of the model (got --targets {','.join(targets)}: {error}); pass names of "
            "its layers, or all-linear"
        ) from error
    return adapted


def _loaded(model: nn.Module, folder: Path) -> nn.Module:
    from peft import PeftModel, get_peft_model_state_dict

    file, weights = folder / CONFIG, folder / WEIGHTS
    for one in (file, weights):
        if not one.is_file():
            raise ValueError(f"adapters are a folder with {CONFIG} and {WEIGHTS} (got none at {one}); pass one")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        kind, base = config["peft_type"], config.get("base_model_name_or_path")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"adapters' configuration must be one of PEFT's (at {file}: {error}); save it again"
        ) from error
    if kind != "LORA" or config.get("use_dora") or config.get("modules_to_save"):
        raise ValueError(
            f"adapters that are trained further must be plain LoRA (at {file}: {kind}, use_dora="
            f"{bool(config.get('use_dora'))}, modules_to_save={config.get('modules_to_save')}); begin new ones with "
            "--lora"
        )
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    shapes_there = _shapes(weights)
    for name, shape in shapes_there.items():
        module, _, part = name.removeprefix("base_model.model.").rpartition(".lora_")
        expected = shapes.get(f"{module}.weight")
        side = {"A.weight": -1, "B.weight": 0}.get(part)
        if not module or side is None or expected is None or shape[side] != expected[side]:
            raise ValueError(
                f"adapters must be of the model that is trained (at {weights}: {name} of {shape}; the model has "
                f"{'no such layer' if expected is None else f'{module}.weight of {expected}'}, and they were made for "
                f"{base!r}); pass that model, or begin new ones with --lora"
            )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tensors that are missing, which are an error below
            base_model: Any = model
            adapted = PeftModel.from_pretrained(base_model, str(folder), is_trainable=True, torch_device="cpu")
    except (RuntimeError, ValueError) as error:  # sizes that are not the configuration's, layers that are not there
        problem = " ".join(str(error).split())[:300]
        raise ValueError(
            f"adapters must be those that their {CONFIG} describes, of the model that is trained (at {weights}: "
            f"{problem}); save them again, or begin new ones with --lora"
        ) from error
    if lacking := sorted(get_peft_model_state_dict(adapted).keys() - shapes_there.keys()):
        raise ValueError(
            f"adapters must be of the model that is trained (at {weights}: none of {len(lacking)} tensors, such as "
            f"{lacking[0]}; they were made for {base!r}); pass that model, or begin new ones with --lora"
        )
    return adapted


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"cannot read {str(file)!r} ({error}); is it whole? download or save it again") from error
