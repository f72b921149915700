"""The names that a model's tensors have in the files of a base, whatever adapters of PEFT are around them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import Tensor, nn


def base_of(model: nn.Module) -> nn.Module:
    """Returns the model that a PeftModel is around, or ``model`` itself."""
    peft = sys.modules.get("peft")  # without it there is none
    if peft is not None and isinstance(model, peft.PeftModel):
        base: nn.Module = model.get_base_model()
        return base
    return model


def modules_of_base(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules of a base, under every name of theirs, by the names that they had before adapters came.

    What an adapter is around has the adapter's name then; what belongs to the adapter has names below it.
    """
    peft = sys.modules.get("peft")
    inner: dict[str, type] = {}
    if peft is not None:
        beside = peft.utils.AuxiliaryTrainingWrapper  # around what trains as a whole, or of which some tokens do
        inner = {
            "base_layer": peft.tuners.tuners_utils.BaseTunerLayer,
            "original_module": beside,
            "token_adapter": beside,
        }

    def walk(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        yield prefix, module
        for name, child in module._modules.items():
            if child is not None:
                same = name in inner and isinstance(module, inner[name])
                yield from walk(prefix if same else f"{prefix}.{name}" if prefix else name, child)

    return walk("", model)


def copies_in(model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the tensors on the meta device that begin as copies of a base's, by ``modules_to_save``, each behind that.

    Raises ValueError for trainable tokens on the meta device: they begin as rows of an embedding that must be there.
    """
    if (peft := sys.modules.get("peft")) is None:
        return
    for prefix, module in model.named_modules():
        if isinstance(module, peft.utils.ModulesToSaveWrapper):
            original = module.original_module
            originals = {**dict(original.named_parameters()), **dict(original.named_buffers())}
            for copy in module.modules_to_save.values():
                for name, tensor in [*copy.named_parameters(), *copy.named_buffers()]:
                    if tensor.is_meta and name in originals:
                        yield originals[name], tensor
        of_tokens = isinstance(module, peft.tuners.trainable_tokens.TrainableTokensLayer)
        tokens = module.trainable_tokens_delta if of_tokens else {}
        if any(delta.is_meta for delta in tokens.values()):
            raise ValueError(
                f"trainable tokens begin as rows of the embedding, which must have its values (got {prefix} on the "
                "meta device); load the base with stronghold.load first, then call get_peft_model"
            )
