"""What is added to a model after ``offload``, such as adapters, trains as if it had been there before."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import stronghold
from stronghold.engine import engine_of, offload_shared
from stronghold.errors import BudgetError, OffloadedModelError, StoreError
from stronghold.unit import unit_of
from tests.adapters import CONFIGS, LAYERS, PLACES, adapted, base, batches, offload, train, trained, with_adapters
from tests.crossed import crossed
from tests.reference import differences, snapshot
from tests.replicas import in_threads
from tests.small import Residual, numbers

WITHOUT_DROPOUT = peft.LoraConfig(r=2, target_modules="all-linear")


@pytest.mark.parametrize(("name", "settings"), crossed(["vera", "dora"], PLACES, together=1), ids=str)
def test_adapters_that_are_added_after_offload_learn_the_bits_that_they_learn_in_memory(
    tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    if "micro_batch" in settings:
        settings = {**settings, "micro_batch": 2}  # products of other shapes round in other ways
    plain, model = adapted(CONFIGS[name]), with_adapters(offload(tmp_path, base(), **settings), CONFIGS[name])
    rows = [
        train(one, torch.optim.AdamW(trained(one), lr=1e-2, foreach=False), accumulation=2) for one in (plain, model)
    ]
    assert rows[1] == rows[0]
    for (key, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, other), key


@pytest.mark.parametrize(("store", "update"), crossed(["ram", "disk"], ["deferred", "in_backward"], together=1))
def test_our_optimizer_makes_the_bits_that_it_makes_of_those_that_were_there_before(
    tmp_path: Path, store: str, update: str
) -> None:
    settings = {"window": 2, **({"store": "disk"} if store == "disk" else {})}
    found = []
    for number in range(2):
        if number:
            model = with_adapters(offload(tmp_path / "1", base(), **settings), CONFIGS["lora"])
        else:
            model = offload(tmp_path / "0", adapted(CONFIGS["lora"]), **settings)
        optimizer = stronghold.AdamW(trained(model), lr=1e-2, update=update)
        found.append((train(model, optimizer), snapshot(model, optimizer), stronghold.report(model)))
    assert found[1][0] == found[0][0]
    assert differences(found[1][1], found[0][1]) == []
    for name in ("device_bytes", "trainable_parameters", "root_gradients_device_bytes"):
        assert getattr(found[1][2], name) == getattr(found[0][2], name), name
    if store == "ram":  # what is added has its states there, and needs no ring for the way to disk
        assert found[1][2].host_bytes == found[0][2].host_bytes


def test_an_adapter_that_is_added_to_others_trains_with_them() -> None:
    """A reference adapter of DPO's, say."""
    plain, model = adapted(WITHOUT_DROPOUT), stronghold.offload(adapted(WITHOUT_DROPOUT), device="cpu", window=2)
    rows = []
    for one in (plain, model):
        losses = train(one, torch.optim.AdamW(trained(one), lr=1e-2, foreach=False), steps=2)
        torch.manual_seed(7)
        one.add_adapter("other", peft.LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False))
        one.set_adapter("other")
        rows.append(losses + train(one, torch.optim.AdamW(trained(one), lr=1e-2, foreach=False), steps=2))
    assert rows[1] == rows[0]
    names = {unit_of(p).name for p in trained(model)}
    assert names == {f"base_model.model.model.layers.{number} (added 2)" for number in range(LAYERS)}


def test_adapters_outside_the_layers_train_too() -> None:
    config = peft.LoraConfig(r=2, target_modules=["lm_head", "embed_tokens"], init_lora_weights=False)
    plain, model = adapted(config), with_adapters(stronghold.offload(base(), device="cpu", window=2), config)
    rows = [train(one, torch.optim.AdamW(trained(one), lr=1e-2, foreach=False)) for one in (plain, model)]
    assert rows[1] == rows[0]


def test_a_parameter_in_the_place_of_none_is_taken_in() -> None:
    model = Residual()
    model.layers[1].register_parameter("scale", None)
    stronghold.offload(model, device="cpu", window=2)
    model.layers[1].scale = nn.Parameter(torch.ones(1))
    model(numbers(1)[0])
    assert unit_of(model.layers[1].scale).name == "layers.1 (added)"


def test_a_checkpoint_has_what_was_added_and_goes_on_to_the_bit(tmp_path: Path) -> None:
    def begun(number: int) -> tuple[nn.Module, stronghold.AdamW]:
        model = with_adapters(offload(tmp_path / str(number), base(), window=2, store="disk"), WITHOUT_DROPOUT)
        return model, stronghold.AdamW(trained(model), lr=1e-2)

    model, optimizer = begun(0)
    train(model, optimizer)
    with pytest.raises(StoreError, match=r"beside which parameters were added since, such as adapters\); save into an"):
        stronghold.checkpoint.save(tmp_path / "0" / "store", model, optimizer)
    kept = stronghold.checkpoint.save(tmp_path / "kept", model, optimizer)
    expected = train(model, optimizer), snapshot(model, optimizer)
    model, optimizer = begun(1)
    stronghold.checkpoint.load(kept, model, optimizer)
    assert train(model, optimizer) == expected[0]
    assert differences(snapshot(model, optimizer), expected[1]) == []


def test_what_was_added_is_saved_as_peft_saves_it(tmp_path: Path) -> None:
    model = with_adapters(stronghold.offload(base(), device="cpu", window=2), WITHOUT_DROPOUT)
    train(model, stronghold.AdamW(trained(model), lr=1e-2))
    stronghold.save(model, tmp_path / "adapters")
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "adapters")
    (ids,) = batches(1)
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)


def test_what_the_device_has_no_room_for_is_refused_and_nothing_has_changed() -> None:
    plain = stronghold.offload(base(), device="cpu", window=1)
    taken = stronghold.report(plain).device_bytes
    model = with_adapters(stronghold.offload(base(), device="cpu", window=1, device_memory=taken), WITHOUT_DROPOUT)
    before = stronghold.report(model)
    with pytest.raises(BudgetError, match="what was added to the model takes"):
        stronghold.AdamW(trained(model))
    assert stronghold.report(model) == before


def test_an_optimizer_over_another_model_s_parameters_says_so() -> None:
    stronghold.offload(base(), device="cpu", window=1)
    with pytest.raises(OffloadedModelError, match=r"belongs to no offloaded model\)"):
        stronghold.AdamW(trained(adapted(WITHOUT_DROPOUT)))


PROMPTS = [
    peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
]


@pytest.mark.parametrize("config", PROMPTS, ids=lambda config: config.peft_type.value)
def test_encoders_of_prompts_around_an_offloaded_model_are_refused_with_what_works(config: peft.PeftConfig) -> None:
    def prompted(model: nn.Module) -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(model, config)

    around = prompted(stronghold.offload(base(torch.float32), device="cpu", window=2))
    remedy = (
        r"belongs to no offloaded model\); .* put it there first and offload the whole, or have an optimizer of torch"
    )
    with pytest.raises(OffloadedModelError, match=remedy):
        stronghold.AdamW(trained(around))
    plain, whole = prompted(base(torch.float32)), stronghold.offload(prompted(base(torch.float32)), device="cpu")
    expected = train(plain, torch.optim.AdamW(trained(plain), lr=1e-2, foreach=False))
    assert train(around, torch.optim.AdamW(trained(around), lr=1e-2, foreach=False)) == expected
    assert train(whole, stronghold.AdamW(trained(whole), lr=1e-2)) == pytest.approx(expected, rel=1e-6)
    for one, two, three in zip(trained(plain), trained(around), trained(whole), strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(three.detach(), one.detach())


def test_replicas_are_refused_what_each_would_have_added_for_itself() -> None:
    def run(replicas: Any) -> None:
        model = offload_shared(base(), replicas, device="cpu", window=1)
        model = with_adapters(model, WITHOUT_DROPOUT)
        with pytest.raises(OffloadedModelError, match="where one process trains the model"):
            stronghold.AdamW(trained(model))
        stronghold.close(engine_of(model).model())

    in_threads(2, run)


@pytest.mark.parametrize("store", ["ram", "disk"])
def test_masters_that_were_trained_are_kept_when_an_adapter_is_added_behind_their_optimizer(
    tmp_path: Path, store: str
) -> None:
    settings = {"window": 2, "dtype": torch.bfloat16, **({"store": "disk"} if store == "disk" else {})}
    model = offload(tmp_path, base(torch.float32), **settings)
    layer = unit_of(next(model.model.layers[0].parameters()))
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, steps=2)
    optimizer.wait()
    del optimizer
    gc.collect()
    learned = {name: unit_of(p).master(p._index).clone() for name, p in model.named_parameters()}
    assert any(not torch.equal(master, master.bfloat16().float()) for master in learned.values())
    model = with_adapters(model, WITHOUT_DROPOUT)
    train(model, stronghold.AdamW(trained(model), lr=1e-2), steps=1)
    assert layer.gradients.buffer is None
    assert not layer.trainable
    found = {name: p for name, p in model.get_base_model().named_parameters() if "lora" not in name}
    for (name, master), p in zip(learned.items(), found.values(), strict=True):
        assert torch.equal(unit_of(p).master(p._index), master), name


def test_adapters_that_share_memory_are_refused_as_before_offload() -> None:
    """PEFT ties an output layer's adapter to the embedding's by views of one memory, which plain PyTorch trains so."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True)
    tied = peft.get_peft_model(base(torch.float32, tie_word_embeddings=True), config).base_model.model
    before, beside = tied.model.embed_tokens.lora_embedding_A, tied.lm_head.lora_B
    assert before["default"].data_ptr() == beside["default"].weight.data_ptr()

    message = r"must not share memory unless they are one parameter \(got (base_model\.model\.)?lm_head\.lora_"
    with pytest.raises(ValueError, match=message):
        stronghold.offload(
            peft.get_peft_model(base(torch.float32, tie_word_embeddings=True), config), device="cpu", window=2
        )
    inner = stronghold.offload(base(torch.float32, tie_word_embeddings=True), device="cpu", window=2)
    model = peft.get_peft_model(inner, config)
    report, units = stronghold.report(inner), list(engine_of(inner).units)
    with pytest.raises(ValueError, match=message):
        stronghold.AdamW(trained(model))
    with pytest.raises(ValueError, match=message):
        model(input_ids=batches(1)[0])
    assert stronghold.report(inner) == report
    assert engine_of(inner).units == units
    assert not any(unit.is_aliased or unit.touched for unit in units)


def test_what_shares_memory_with_a_parameter_that_is_offloaded_is_refused() -> None:
    model = stronghold.offload(Residual(), device="cpu", window=2)
    model.again = nn.Parameter(model.layers[1].up.weight.data)
    with pytest.raises(ValueError, match=r"share memory .*\(got again and layers.1.up.weight\)"):
        model(numbers(1)[0])


def test_adapters_without_values_are_waited_for_until_they_have_some() -> None:
    """PEFT's EVA runs the model before it makes the weights of its adapters, in the place of those on the meta device.

    It has none of them compute meanwhile.
    """
    settings = peft.EvaConfig(rho=2.0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="eva", eva_config=settings)
    data = [{"input_ids": ids} for ids in batches(6)]
    rows, models = [], []
    for model in (base(torch.float32), stronghold.offload(base(torch.float32), device="cpu", window=2)):
        torch.manual_seed(1)
        adapted = peft.get_peft_model(model, copy.deepcopy(config), low_cpu_mem_usage=True)  # it notes ranks there
        if models:
            units = list(engine_of(model).units)
            with adapted.disable_adapter():
                assert torch.equal(adapted(**data[0]).logits, base(torch.float32)(**data[0]).logits)
            assert engine_of(model).units == units
            with pytest.raises(OffloadedModelError, match=r"on the meta device\); give it values"):
                stronghold.AdamW(trained(adapted))
        peft.initialize_lora_eva_weights(adapted, data, show_progress_bar=False)
        rows.append(train(adapted, torch.optim.AdamW(trained(adapted), lr=1e-2, foreach=False)))
        models.append(adapted)
    assert rows[1] == rows[0]
    for (key, parameter), other in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
        assert torch.equal(parameter, other), key
    assert all(unit_of(p) in engine_of(model).units for p in trained(models[1]))


def test_what_gets_its_values_in_its_place_is_taken_in() -> None:
    model = stronghold.offload(Residual(), device="cpu", window=2)
    model.layers[1].register_parameter("scale", nn.Parameter(torch.ones(1, device="meta")))
    model.layers[1].register_buffer("mask", torch.ones(1, device="meta"))
    model(numbers(1)[0])
    assert unit_of(model.layers[1].scale) is None
    torch.utils.swap_tensors(model.layers[1].scale, nn.Parameter(torch.ones(1)))
    model(numbers(1)[0])
    assert unit_of(model.layers[1].scale).name == "layers.1 (added)"
