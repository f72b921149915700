"""What a model of transformers knows of weights that are torchao's, where these were read layer by layer."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel, TorchAoConfig
from transformers.quantizers.quantizer_torchao import TorchAoHfQuantizer


class StreamedQuantizer(TorchAoHfQuantizer):
    """transformers' own, by which ``save_pretrained`` writes the tensors within each weight.

    transformers says of eight bits alone that adapters can be trained beside them; ``offload`` has computed a row back
    through a weight of each kind, and refuses those where that cannot be.
    """

    @property
    def is_trainable(self) -> bool:
        return True


def note_torchao(model: nn.Module, config: dict[str, Any]) -> None:
    """Notes as transformers does that torchao has quantised ``model``, by the config.json's ``quantization_config``."""
    if isinstance(model, PreTrainedModel):
        quantizer: Any = StreamedQuantizer(TorchAoConfig.from_dict(dict(config)), pre_quantized=True)
        model.hf_quantizer = quantizer
