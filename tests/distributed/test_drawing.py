"""Parts of a model begin with the values that they have in the whole, in whatever order they are asked for."""

from __future__ import annotations

import random

import pytest
import torch

from stronghold.distributed.drawing import as_within
from stronghold.lab.models.gpt import GPT, GPTConfig

CONFIG = GPTConfig(layers=4, hidden=32, heads=2, sequence=16, vocabulary=100)


@pytest.mark.parametrize("seed", range(5))
def test_each_module_has_the_values_of_the_whole_model(seed):
    torch.manual_seed(seed)
    whole = dict(GPT(CONFIG).named_parameters())
    with torch.device("meta"):
        model = GPT(CONFIG)
    names = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
    wanted = random.Random(seed).sample(names, len(names) // 2)
    torch.manual_seed(seed)
    draw = as_within(model, model.initialize_module)
    draw(torch.nn.ModuleList())  # a container of ours draws nothing
    for name in wanted:
        module = model.get_submodule(name)
        for own, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, own, torch.nn.Parameter(torch.full(parameter.shape, torch.nan)))
        draw(module)
        for own, parameter in module.named_parameters(recurse=False):
            assert torch.equal(parameter, whole[f"{name}.{own}"])
    assert all(p.is_meta for name, p in model.named_parameters() if name.rpartition(".")[0] not in wanted)
