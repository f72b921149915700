"""Mixtures of experts are planned as if each expert had as many rows; a cache that a layer fills, as it was found."""

from __future__ import annotations

import pytest
import torch
import transformers

import stronghold
from stronghold.engine.find_layers import find_layers
from stronghold.engine.planning.computation import ModelComputation
from tests.crossed import crossed
from tests.engine.planning.test_computation import counted, flops
from tests.experts import FAMILIES, model

BATCH = torch.arange(2 * 16).reshape(2, 16)
INPUTS = {"input_ids": BATCH, "labels": BATCH}


def planned(of: torch.nn.Module) -> ModelComputation:
    return ModelComputation(of, [layer.module for layer in find_layers(of)], INPUTS)


@pytest.mark.parametrize(
    ("family", "how", "experts_per_part"),
    crossed([*FAMILIES], ["eager", "grouped_mm"], [None, 3, 1], together=1),
)
def test_operations_are_those_of_the_model(family, how, experts_per_part):
    """However tokens are routed, the experts together have as many rows, as torch's own counter counts them."""
    of = model(family)
    of.set_attn_implementation("eager")  # torch's counter does not know the CPU's own attention
    expected = counted(lambda: of(**INPUTS))
    of.config._experts_implementation = how
    if experts_per_part is not None:
        stronghold.split_experts(of, experts_per_part)
    found = planned(of)
    layers = sum(flops(found.layer(number).forward) for number in range(len(find_layers(of))))
    assert layers + flops(found.root.before) + flops(found.root.behind) == expected
    assert not any("forward" in vars(module) for module in of.modules())


def test_a_cache_that_layers_fill_is_in_the_second_run_as_the_first_found_it():
    config = transformers.Gemma3TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        sliding_window=8,
    )
    of = transformers.Gemma3ForCausalLM(config)
    backward = [planned(of).passes(0, None, kept=False).backward_bytes]
    of.config.use_cache = False
    backward.append(planned(of).passes(0, None, kept=False).backward_bytes)
    assert backward[0] == backward[1]
