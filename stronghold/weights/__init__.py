"""Where a model's values come from while it has none: a checkpoint's files, or an initialiser, layer by layer."""

from stronghold.weights.checkpoint import Checkpoint
from stronghold.weights.conversion import Group, from_model, into_model
from stronghold.weights.sources import Initialiser, Source, Weights, fill, give_values, open_weights

__all__ = [
    "Checkpoint",
    "Group",
    "Initialiser",
    "Source",
    "Weights",
    "fill",
    "from_model",
    "give_values",
    "into_model",
    "open_weights",
]
