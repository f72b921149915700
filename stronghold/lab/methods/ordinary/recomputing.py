"""Activation checkpointing: Chen et al., Training Deep Nets with Sublinear Memory Cost (2016)."""

from functools import partial

from torch.utils.checkpoint import checkpoint

from stronghold.lab.models.gpt import GPT


def recompute_layers(model: GPT, *, use_reentrant: bool = False) -> None:
    """Lets each layer keep its input alone, and run again in the backward pass."""
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=use_reentrant)
