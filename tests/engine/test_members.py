"""What is added to a model after ``offload`` is named, with the order that works."""

import peft
import pytest
import torch
from torch import nn

import stronghold
from stronghold.errors import OffloadedModelError
from tests.reference import CASES, train
from tests.small import Residual, numbers

CASE = CASES["llama"]


def adapters(*targets):
    return peft.LoraConfig(r=2, target_modules=list(targets))


@pytest.mark.parametrize("window", [2, "auto"])
def test_adapters_that_are_added_after_offload_are_named(window):
    model = peft.get_peft_model(
        stronghold.offload(CASE.model(), device="cpu", window=window), adapters("q_proj", "v_proj")
    )
    with pytest.raises(OffloadedModelError) as error:
        model(**CASE.batches(1)[0])
    told = str(error.value)
    for name in ("0.self_attn.q_proj", "0.self_attn.v_proj", "1.self_attn.q_proj", "1.self_attn.v_proj"):
        assert f"model.layers.{name} was Linear and is peft.tuners.lora.layer.Linear" in told
    assert "; and 4 more). Change it first (peft.get_peft_model, then offload)" in told
    assert "offload(trainer.model) and set trainer.optimizer" in told


def test_an_optimizer_over_them_says_the_order_too():
    model = peft.get_peft_model(stronghold.offload(CASE.model(), device="cpu"), adapters("q_proj"))
    with pytest.raises(OffloadedModelError, match=r"belongs to no offloaded model\).*all its modules are there \(PEFT"):
        stronghold.AdamW([p for p in model.parameters() if p.requires_grad])


def test_an_adapter_that_is_added_to_others_is_named():
    """A reference adapter of DPO's, say."""
    model = stronghold.offload(peft.get_peft_model(CASE.model(), adapters("q_proj")), device="cpu", window=2)
    model.add_adapter("reference", adapters("q_proj"))
    with pytest.raises(OffloadedModelError, match=r"0\.self_attn\.q_proj\.lora_A\.reference \(Linear\) was added"):
        model(**CASE.batches(1)[0])


def test_adapters_outside_the_layers_are_named():
    model = peft.get_peft_model(stronghold.offload(CASE.model(), device="cpu", window=2), adapters("lm_head"))
    with pytest.raises(OffloadedModelError, match=r"left out \(got: lm_head was Linear and is peft\.tuners\.lora"):
        model(**CASE.batches(1)[0])


def test_the_order_that_works():
    torch.manual_seed(0)
    plain = peft.get_peft_model(CASE.model(), adapters("q_proj", "v_proj"))
    torch.manual_seed(0)
    model = peft.get_peft_model(CASE.model(), adapters("q_proj", "v_proj"))
    stronghold.offload(model, device="cpu", window=2)
    losses = []
    for one, adamw in ((plain, torch.optim.AdamW), (model, stronghold.AdamW)):
        optimizer = adamw([p for p in one.parameters() if p.requires_grad], lr=1e-2)
        losses.append(train(one, optimizer, CASE.batches(4)))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)


def test_a_parameter_in_the_place_of_none_is_named():
    model = Residual()
    model.layers[1].register_parameter("scale", None)
    stronghold.offload(model, device="cpu", window=2)
    model.layers[1].scale = nn.Parameter(torch.ones(1))
    with pytest.raises(OffloadedModelError, match=r"\(got: layers\.1\.scale \(a parameter\) was added\)"):
        model(numbers(1)[0])


def test_what_is_removed_again_is_no_change():
    model = stronghold.offload(Residual(), device="cpu", window=2)
    model.layers[1].extra = nn.Identity()
    with pytest.raises(OffloadedModelError, match=r"\(got: layers\.1\.extra \(Identity\) was added\)"):
        model(numbers(1)[0])
    del model.layers[1].extra
    model(numbers(1)[0])


def test_a_checkpoint_leaves_nothing_out(tmp_path):
    model = stronghold.offload(Residual(), device="cpu", window=2)
    optimizer = stronghold.AdamW(model.parameters())
    model.extra = nn.Linear(2, 2)
    with pytest.raises(OffloadedModelError, match=r"got extra\.weight, which a checkpoint would leave out"):
        stronghold.checkpoint.save(tmp_path / "kept", model, optimizer)
    assert not list(tmp_path.iterdir())
