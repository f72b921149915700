"""Adapters of PEFT's: saved as PEFT, or transformers, saves them, with values from wherever the model lives."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

CONFIG = "adapter_config.json"


def has_adapters(model: nn.Module) -> bool:
    """Whether ``model`` is one that PEFT, or transformers with PEFT, saves by its adapters.

    Raises ValueError for a model with a configuration that holds PEFT's layers and is neither: files of their names
    beside that configuration would be read back as random weights. Raises it too for several adapters in a model of
    transformers' own, which saves one.
    """
    if "peft" not in sys.modules:
        return False
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    if isinstance(model, PeftModel):
        return True
    layers = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    inner = next((name for name, module in model.named_modules() if isinstance(module, layers)), None)
    if inner is None or not hasattr(getattr(model, "config", None), "save_pretrained"):
        return False
    if not getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"a model whose layers PEFT has wrapped must be saved by the PeftModel around it (got its "
            f"{type(model).__name__}, with {inner}); pass what get_peft_model() returned, or merge the adapters before "
            "offload() (merge_and_unload())"
        )
    if len(names := list(_configs(model))) > 1:
        raise ValueError(
            f"a model with adapters of transformers' own is saved with the one that is active (got {', '.join(names)})"
            "; delete the others (delete_adapter), or make them by peft.get_peft_model, which saves all"
        )
    return True


def save_adapters(model: Any, folder: Path, value: Callable[[Tensor], Tensor], dtype: torch.dtype | None) -> None:
    """Writes all adapters of ``model`` into ``folder``, as its own ``save_pretrained`` would.

    ``value`` returns what is written of a parameter or buffer: it is asked for what belongs to an adapter alone, all of
    which is in memory at a time. Raises ValueError for what PEFT computes elsewhere, in another dtype than ``dtype``.
    """
    tensors = dict(_state_of(model))
    wanted = _wanted(model, tensors, dtype)
    state = {name: value(tensor) if name in wanted else _without_values(tensor) for name, tensor in tensors.items()}
    config = getattr(model, "config", None)
    before = {name: getattr(config, name) for name in ("dtype", "architectures") if hasattr(config, name)}
    try:
        model.save_pretrained(str(folder), state_dict=state)
    finally:
        for name, kept in before.items():  # transformers writes into it
            setattr(config, name, kept)


class _StandIn(Tensor):
    """Stands for tensors of the model, by their names in ``state_dict()``, without their values.

    So does what PEFT computes of it. It has one number in the place of all: on the meta device there would be none, and
    AdaLoRA's mask of ranks, of which it takes the rows, could not be counted there.
    """

    stands_for: frozenset[str] = frozenset()

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> _StandIn:
        stand_in = torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape).as_subclass(cls)
        stand_in.stands_for = frozenset([name])
        return stand_in

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        sources = [one.stands_for for one in tree_leaves((args, kwargs)) if isinstance(one, cls)]
        for made in tree_leaves(found):
            if isinstance(made, cls):
                made.stands_for = frozenset().union(*sources)
        return found


def _wanted(model: Any, tensors: dict[str, Tensor], dtype: torch.dtype | None) -> set[str]:
    """Returns the names, in ``state_dict()``, of what belongs to the adapters of ``model``: PEFT chooses."""
    from peft import get_peft_model_state_dict

    stand_ins = {name: _StandIn.of(name, tensor) for name, tensor in tensors.items()}
    found: set[str] = set()
    for adapter in _configs(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come again when it saves
            chosen = get_peft_model_state_dict(model, state_dict=dict(stand_ins), adapter_name=adapter)
        for name, tensor in chosen.items():
            if isinstance(tensor, _StandIn):
                found |= tensor.stands_for
            elif dtype not in (None, tensor.dtype):
                raise ValueError(
                    f"dtype must be None where PEFT computes what it saves by the model itself (got {dtype} for {name} "
                    f"of adapter {adapter!r}, in {tensor.dtype}); leave it out"
                )
    return found


def _configs(model: Any) -> dict[str, Any]:
    return model.peft_config


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _state_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields what ``state_dict()`` has, without reading it."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), tensor
