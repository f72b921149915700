"""What experts in parts have in a ``state_dict()``: the names and values of the whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class WholeNames(nn.Module):
    """Has stacked parameters cut apart into ``parts``, and under their own names in ``state_dict()``."""

    parts: nn.ModuleList

    def __init__(self, names: list[str], num_experts: int, experts_per_part: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.experts_per_part = experts_per_part
        self._names = names
        self._told: set[str] = set()
        """Names of pieces of what a ``load_state_dict()`` under way has told of as a whole."""
        self.register_state_dict_post_hook(_join)
        self.register_load_state_dict_pre_hook(_cut)
        self.register_load_state_dict_post_hook(_leave_out_told)

    def pieces(self) -> dict[str, list[str]]:
        """Returns the names in the whole experts' ``state_dict()``, each with those of its parts here."""
        return {name: [f"parts.{i}.experts.{name}" for i in range(len(self.parts))] for name in self._names}


def _join(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    assert isinstance(module, WholeNames)
    for name, pieces in module.pieces().items():
        values = [state_dict.pop(prefix + piece) for piece in pieces if prefix + piece in state_dict]
        if values:
            state_dict[prefix + name] = torch.cat([value.detach() for value in values])


def _cut(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    _local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    _unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    assert isinstance(module, WholeNames)
    module._told.clear()
    for name, pieces in module.pieces().items():
        key, keys = prefix + name, [prefix + piece for piece in pieces]
        if key in state_dict:
            whole = state_dict.pop(key)
            if (problem := _problem(key, whole, module.get_parameter(pieces[0]), module.num_experts)) is None:
                state_dict.update(zip(keys, whole.split(module.experts_per_part), strict=True))
                continue
            error_msgs.append(problem)
        elif any(one in state_dict for one in keys):
            continue
        elif strict:
            missing_keys.append(key)
        module._told.update(keys)


def _problem(key: str, whole: Any, piece: Tensor, experts: int) -> str | None:
    """Returns what nn.Module says of a value for a parameter of the whole, None where there is nothing to say."""
    if not isinstance(whole, Tensor):
        return (
            f'While copying the parameter named "{key}", expected torch.Tensor or Tensor-like object from checkpoint '
            f"but received {type(whole)}"
        )
    shape = torch.Size((experts, *piece.shape[1:]))
    if whole.shape == shape:
        return None
    return (
        f"size mismatch for {key}: copying a param with shape {whole.shape} from checkpoint, the shape in current "
        f"model is {shape}."
    )


def _leave_out_told(module: nn.Module, incompatible_keys: Any) -> None:
    assert isinstance(module, WholeNames)
    missing = incompatible_keys.missing_keys
    missing[:] = [key for key in missing if key not in module._told]
    module._told.clear()
