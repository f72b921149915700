"""What is taken away from a model after ``offload``, or replaced, is named."""

import gc

import peft
import pytest
import torch
from torch import nn

import stronghold
from stronghold.errors import OffloadedModelError
from tests.reference import CASES
from tests.small import Residual

CASE = CASES["llama"]


def test_modules_that_are_taken_away_are_named():
    model = stronghold.offload(CASE.model(), device="cpu", window=2)
    layers = model.model.layers
    kept = layers[0].self_attn.q_proj, layers[1].mlp.up_proj
    layers[0].self_attn.q_proj, layers[1].mlp.up_proj = nn.Identity(), nn.Linear(2, 2)
    with pytest.raises(OffloadedModelError) as error:
        model(**CASE.batches(1)[0])
    told = str(error.value)
    assert "model.layers.0.self_attn.q_proj was Linear and is Identity" in told
    layers[0].self_attn.q_proj, layers[1].mlp.up_proj = kept
    model(**CASE.batches(1)[0])


def test_layers_that_are_taken_away_are_named():
    model = stronghold.offload(CASE.model(), device="cpu", window=2)
    model.model.layers = model.model.layers[:1]
    gc.collect()
    with pytest.raises(OffloadedModelError, match=r"nothing may go or be replaced .*model\.layers was another module"):
        model(**CASE.batches(1)[0])


def test_more_changes_than_a_few_are_counted():
    model = stronghold.offload(CASE.model(), device="cpu", window=2)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(layer.self_attn, name, nn.Identity())
    with pytest.raises(OffloadedModelError, match=r"; and \d+ more\)\. Change it first"):
        model(**CASE.batches(1)[0])


def test_a_checkpoint_leaves_nothing_out(tmp_path):
    model = stronghold.offload(Residual(), device="cpu", window=2)
    optimizer = stronghold.AdamW(model.parameters())
    model.extra = nn.Linear(2, 2)
    with pytest.raises(OffloadedModelError, match=r"got extra\.weight, which a checkpoint would leave out"):
        stronghold.checkpoint.save(tmp_path / "kept", model, optimizer)
    assert not list(tmp_path.iterdir())


def with_two_adapters():
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(CASE.model(), lora)
    model.add_adapter("other", lora)
    return stronghold.offload(model, device="cpu", window=2)


def by_delete_adapter(model):
    model.delete_adapter("other")


def by_merging(model):
    model.merge_and_unload()


TAKEN_AWAY = {
    by_delete_adapter: r"other was removed; .*may stay, with another one made active by PEFT's set_adapter\(\)",
    by_merging: r"was another module and is Linear; .*merged by merge_adapter\(\) instead of merge_and_unload\(\)",
}


def test_a_state_dict_that_is_assigned_is_refused_with_what_does_the_same():
    model = stronghold.offload(Residual(), device="cpu", window=1)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with pytest.raises(OffloadedModelError, match=r"is another parameter.*load_state_dict\(\) without assign=True"):
        stronghold.AdamW(model.parameters())
    with pytest.raises(
        OffloadedModelError, match=r"replaced after offload\(\), as by .*load_state_dict\(assign=True\)"
    ):
        model(torch.randn(2, 16))


@pytest.mark.parametrize("taken_away", TAKEN_AWAY, ids=lambda change: change.__name__)
def test_the_remedy_is_that_for_what_was_taken_away(tmp_path, taken_away):
    """Of adapters, too: behind ``delete_adapter()`` it was ``get_peft_model``, and of a checkpoint a KeyError."""
    model = with_two_adapters()
    optimizer = stronghold.AdamW([p for name, p in model.named_parameters() if "lora_" in name])
    taken_away(model)
    with pytest.raises(OffloadedModelError, match=TAKEN_AWAY[taken_away]) as error:
        model(**CASE.batches(1)[0])
    assert "peft_config" not in str(error.value)
    for format in ("safetensors", "dcp"):
        with pytest.raises(OffloadedModelError):
            stronghold.checkpoint.save(tmp_path / format, model, optimizer, format=format)
    assert not list(tmp_path.iterdir())
