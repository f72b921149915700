"""A base in bitsandbytes' four bits goes through the window as the bytes that it is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import bitsandbytes
import peft
import pytest
import torch
import transformers
from torch import nn

import stronghold
from stronghold.errors import CheckpointError
from tests.adapters import PLACES, base, batches, offload, train, trained, with_adapters
from tests.reference import differences, snapshot

LORA = peft.LoraConfig(r=2, target_modules="all-linear")
FOUR_BITS = [place for place in PLACES if "micro_batch" not in place and place.get("activations") != "keep"]


def packed(
    nested: bool = False, kind: str = "nf4", pack: bool = True, storage: torch.dtype = torch.uint8, **more: Any
) -> nn.Module:
    """Returns a Llama in bf16 whose linear layers are in four bits, as transformers makes them."""
    model = base(**more)
    for module in [*model.model.layers.modules()]:  # type: ignore[union-attr, operator]
        for name, child in [*module.named_children()]:
            if isinstance(child, nn.Linear):
                linear = bitsandbytes.nn.Linear4bit(
                    child.in_features, child.out_features, bias=False, compute_dtype=torch.bfloat16
                )
                linear.weight = bitsandbytes.nn.Params4bit(
                    child.weight.data, quant_type=kind, compress_statistics=nested, module=linear, quant_storage=storage
                )
                linear.support_avx512bf16_for_cpu = False  # else evaluation computes with other bits
                setattr(module, name, linear.to("cpu") if pack else linear)
    return model


def packed_bytes(model: nn.Module) -> int:
    found = 0
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            state = module.weight.quant_state
            found += module.weight.nbytes + state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0)
    return found


def evaluated(model: nn.Module) -> list[float]:
    with torch.no_grad():
        return [model.eval()(input_ids=ids, labels=ids).loss.item() for ids in batches(2)]


CASES = [
    *((nested, "nf4", place, "adapters") for nested in (False, True) for place in FOUR_BITS),
    *((True, "nf4", place, "offload") for place in FOUR_BITS if place.get("window") == 2),
    (True, "fp4", {"window": 2}, "adapters"),
]


@pytest.mark.parametrize(("nested", "kind", "settings", "first"), CASES, ids=str)
def test_adapters_learn_the_bits_that_they_learn_in_memory(
    tmp_path: Path, nested: bool, kind: str, settings: dict[str, Any], first: str
) -> None:
    plain = with_adapters(packed(nested, kind), LORA)
    if first == "adapters":
        model = offload(tmp_path, with_adapters(packed(nested, kind), LORA), **settings)
    else:
        model = with_adapters(offload(tmp_path, packed(nested, kind), **settings), LORA)
    rows = []
    for one in (plain, model):
        optimizer = torch.optim.AdamW(trained(one), lr=1e-2, foreach=False)
        rows.append(train(one, optimizer, accumulation=2) + evaluated(one) + train(one.train(), optimizer, steps=2))
    assert len(set(rows[0])) > 8
    assert rows[1] == rows[0]
    for (key, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, other), key
    state = plain.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("nested", [False, True])
def test_a_base_takes_what_its_packed_weights_take(nested: bool) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 320}  # a tensor begins at a multiple of 64 bytes
    model = packed(nested, **shape)
    expected = packed_bytes(model)
    linear = sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit))
    assert expected / linear == pytest.approx(0.516 if nested else 0.5625, rel=1e-3)
    others = sum(
        p.numel() * p.element_size() for p in model.parameters() if not isinstance(p, bitsandbytes.nn.Params4bit)
    )
    stronghold.offload(model.requires_grad_(False), device="cpu", window=1)
    report = stronghold.report(model)
    assert expected + others <= report.host_bytes <= 1.02 * (expected + others)
    assert report.parameters == sum(p.numel() for p in base(**shape).parameters())
    assert report.dtype == "bfloat16, weights in four bits"


def test_a_checkpoint_of_it_goes_on_to_the_bit(tmp_path: Path) -> None:
    def begun(number: int) -> tuple[nn.Module, stronghold.AdamW]:
        model = offload(tmp_path / str(number), with_adapters(packed(True), LORA), window=2, store="disk")
        return model, stronghold.AdamW(trained(model), lr=1e-2)

    model, optimizer = begun(0)
    train(model, optimizer)
    for directory in (tmp_path / "kept", tmp_path / "0" / "store"):
        stronghold.checkpoint.save(directory, model, optimizer)
    expected = train(model, optimizer), snapshot(model, optimizer)
    model, optimizer = begun(1)
    stronghold.checkpoint.load(tmp_path / "kept", model, optimizer)
    assert train(model, optimizer) == expected[0]
    assert differences(snapshot(model, optimizer), expected[1]) == []


def test_a_checkpoint_brings_all_of_a_base_and_none_of_another_type(tmp_path: Path) -> None:
    def begun(kind: str, seed: int) -> tuple[nn.Module, stronghold.AdamW]:
        model = packed(True, kind)
        if seed:
            for module in model.modules():
                if isinstance(module, bitsandbytes.nn.Linear4bit):  # bytes, scales and offsets of other weights
                    other = torch.randn(module.out_features, module.in_features, dtype=torch.bfloat16)
                    weight = bitsandbytes.nn.Params4bit(other, quant_type=kind, compress_statistics=True, module=module)
                    module.weight, module.quant_state = weight.to("cpu"), None
        model = with_adapters(stronghold.offload(model, device="cpu", window=2), LORA)
        return model, stronghold.AdamW(trained(model), lr=1e-2)

    model, optimizer = begun("nf4", 0)
    kept = stronghold.checkpoint.save(tmp_path / "kept", model, optimizer)
    other, its_optimizer = begun("nf4", 1)
    assert evaluated(other) != evaluated(model)
    stronghold.checkpoint.load(kept, other, its_optimizer)
    assert evaluated(other) == evaluated(model)
    with pytest.raises(CheckpointError, match=r"fp4\.absmax|nf4\.absmax"):
        stronghold.checkpoint.load(kept, *begun("fp4", 0))


def test_a_copy_of_it_is_a_model_in_memory() -> None:
    model = stronghold.offload(packed(True), device="cpu", window=1)
    copied = copy.deepcopy(model)
    weight = copied.model.layers[0].mlp.up_proj.weight
    assert type(weight) is bitsandbytes.nn.Params4bit
    assert evaluated(copied) == evaluated(model) == evaluated(packed(True))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"must be quantised before it moves \(got model\.layers\.0\.self_attn\.q_proj"
    ):
        stronghold.offload(packed(pack=False), device="cpu", window=1)
    model = packed(storage=torch.bfloat16)
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(True)
    with pytest.raises(
        ValueError, match=r"cannot be trained \(got model\.layers\.1\.mlp\.up_proj\.weight with requires"
    ):
        stronghold.offload(model, device="cpu", window=1)
    with pytest.raises(ValueError, match=r"in four bits in model\.layers\.0\); use activations='recompute'"):
        stronghold.offload(packed(), device="cpu", window=1, activations="keep")
    model = stronghold.offload(packed(), device="cpu", activations="keep")  # all are resident: nothing moves
    assert evaluated(model) == evaluated(packed())


@pytest.mark.parametrize("kind", ["nf4", "nf4_nested"])
@pytest.mark.parametrize("store", ["ram", "disk"])
def test_what_is_quantised_while_it_streams_is_what_transformers_quantises(
    tmp_path: Path, kind: str, store: str
) -> None:
    base().save_pretrained(tmp_path / "model")
    asked = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=kind == "nf4_nested",
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    expected = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=asked, dtype=torch.bfloat16, device_map="cpu"
    )
    settings = {"store": str(tmp_path / "store")} if store == "disk" else {}
    model = stronghold.load(tmp_path / "model", quantize=kind, device="cpu", window=2, **settings)
    state = expected.state_dict()
    assert model.state_dict().keys() == state.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    rows = []
    for one in (expected, model):
        for module in one.modules():
            if isinstance(module, bitsandbytes.nn.Linear4bit):
                module.support_avx512bf16_for_cpu = False
        one.requires_grad_(False)
        adapted = with_adapters(one, LORA).train()
        rows.append(train(adapted, torch.optim.AdamW(trained(adapted), lr=1e-2, foreach=False)))
    assert rows[1] == rows[0]


def test_other_kinds_and_models_without_linear_layers_are_refused(tmp_path: Path) -> None:
    base().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"quantize must be 'nf4' or 'nf4_nested' \(got 'int3'\)"):
        stronghold.load(tmp_path / "model", quantize="int3", device="cpu")


def test_packed_layers_are_not_compiled_which_is_said() -> None:
    found = []
    for compiled in (False, "aot_eager"):
        model = with_adapters(packed(), LORA)
        model.config.use_cache = False  # type: ignore[union-attr]
        model = stronghold.offload(model, device="cpu", window=1, compile=compiled)
        optimizer = stronghold.AdamW(trained(model), lr=1e-2)
        if compiled:
            with pytest.warns(UserWarning, match="a LlamaDecoderLayer is not compiled.*packed weights"):
                losses = train(model, optimizer, 2)
        else:
            losses = train(model, optimizer, 2)
        found.append((losses, snapshot(model, optimizer)))
    report = stronghold.report(model)
    assert report.compiled == 0 < report.not_compiled
    assert found[0][0] == found[1][0]
    assert differences(found[0][1], found[1][1]) == []
