"""The reference GPT as a row of layers, to be cut into stages."""

from torch import Tensor, nn

from stronghold.lab.models.gpt import GPT, GPTConfig, next_token_loss, rotary


class LayeredGPT:
    """A GPT's blocks. The first stage has the embedding too, and the last the final norm and the head, its copy."""

    container = "layers"

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.layers = list(model.layers)

    def stage(self, first: int, end: int) -> "GPTStage":
        """Returns what computes the blocks ``first`` to ``end``, made of the model's own modules."""
        return GPTStage(self.model, first, end)

    @staticmethod
    def loss(stage: nn.Module, output: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss of the last stage's ``output``; ``targets`` are the input's ids, not shifted."""
        assert isinstance(stage, GPTStage) and stage.embedding is not None
        return next_token_loss(output, stage.embedding.weight, targets)


class GPTStage(nn.Module):
    """Blocks of a GPT one behind the other: ids to activations, activations to activations, or to normalized ones."""

    def __init__(self, model: GPT, first: int, end: int) -> None:
        super().__init__()
        self.config: GPTConfig = model.config
        last = end == len(model.layers)
        self.is_first = first == 0
        self.embedding = model.embedding if self.is_first or last else None
        self.dropout = model.dropout if self.is_first else None
        self.layers = nn.ModuleList(model.layers[first:end])
        self.norm = model.norm if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Takes int64 ids (batch, sequence) in the first stage, else (batch, sequence, hidden), which it returns."""
        if self.is_first:
            assert self.embedding is not None and self.dropout is not None
            x = self.dropout(self.embedding(x))
        cos, sin = rotary(x.shape[1], self.config.hidden // self.config.heads, x.device)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x if self.norm is None else self.norm(x)
