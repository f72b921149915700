"""A base in bitsandbytes' four or eight bits goes through the window as the bytes that it is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import accelerate.hooks
import bitsandbytes
import peft
import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

import stronghold
from stronghold.errors import CheckpointError, OffloadedModelError
from tests.adapters import PLACES, base, batches, offload, train, trained, with_adapters
from tests.crossed import crossed
from tests.reference import differences, snapshot

LORA = peft.LoraConfig(r=2, target_modules="all-linear")
WHOLE_BATCH = [place for place in PLACES if "micro_batch" not in place]


def packed(
    nested: bool = False, kind: str = "nf4", pack: bool = True, storage: torch.dtype = torch.uint8, **more: Any
) -> nn.Module:
    """Returns a Llama in bf16 whose linear layers are in four bits, or eight, as transformers makes them."""
    model = base(**more)
    for module in [*model.model.layers.modules()]:  # type: ignore[union-attr, operator]
        for name, child in [*module.named_children()]:
            if isinstance(child, nn.Linear) and kind == "int8":
                linear = bitsandbytes.nn.Linear8bitLt(
                    child.in_features, child.out_features, bias=False, has_fp16_weights=False, threshold=6.0
                )
                linear.weight = bitsandbytes.nn.Int8Params(
                    child.weight.data, requires_grad=False, has_fp16_weights=False
                )
                setattr(module, name, linear.to("cpu") if pack else linear)
            elif isinstance(child, nn.Linear):
                linear = bitsandbytes.nn.Linear4bit(
                    child.in_features, child.out_features, bias=False, compute_dtype=torch.bfloat16
                )
                linear.weight = bitsandbytes.nn.Params4bit(
                    child.weight.data, quant_type=kind, compress_statistics=nested, module=linear, quant_storage=storage
                )
                linear.support_avx512bf16_for_cpu = False  # else evaluation computes with other bits
                setattr(module, name, linear.to("cpu") if pack else linear)
    return model


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize(("kind", "window"), [("nf4", 1), ("nf4", 3), ("int8", 1), ("int8", 3)])
def test_a_backward_pass_finds_each_weight_where_it_is_by_then(kind: str, window: int, activations: str) -> None:
    """Also that of a layer's last operation, which has no adapter, and of runs whose slots have held others since."""
    few = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    plain, model = (with_adapters(packed(kind == "nf4", kind), few) for _ in range(2))
    stronghold.offload(model, device="cpu", window=window, activations=activations)
    gradients = []
    for one in (plain, model):
        first, second, between = batches(3)
        loss = one(input_ids=first, labels=first).loss
        with torch.no_grad():
            one(input_ids=between, labels=between)
        (loss + one(input_ids=second, labels=second).loss).backward()
        gradients.append([parameter.grad for parameter in trained(one)])
    assert len(gradients[0]) == 16
    for mine, theirs in zip(*gradients, strict=True):
        assert theirs.any()
        assert torch.equal(mine, theirs)


def packed_bytes(model: nn.Module) -> int:
    found = 0
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear8bitLt):
            found += module.weight.nbytes + 4 * module.out_features
        elif isinstance(module, bitsandbytes.nn.Linear4bit):
            state = module.weight.quant_state
            found += module.weight.nbytes + state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0)
    return found


def evaluated(model: nn.Module) -> list[float]:
    with torch.no_grad():
        return [model.eval()(input_ids=ids, labels=ids).loss.item() for ids in batches(2)]


TWO = [place for place in WHOLE_BATCH if place.get("window") == 2]
CASES = [
    (True, "nf4", WHOLE_BATCH[0], "adapters"),
    *(pytest.param(True, "nf4", place, "adapters", marks=pytest.mark.long) for place in WHOLE_BATCH[1:]),
    *(pytest.param(True, "nf4", place, "offload", marks=pytest.mark.long) for place in TWO),
    pytest.param(False, "nf4", {"window": 1}, "adapters", marks=pytest.mark.long),
    pytest.param(False, "fp4", {"window": 2, "activations": "keep"}, "offload", marks=pytest.mark.long),
    *(
        pytest.param(False, "int8", place, "adapters", marks=() if len(place) > 1 else pytest.mark.long)
        for place in WHOLE_BATCH
        if place.get("store") is None
    ),
    (False, "int8", {"window": 2, "store": "disk"}, "offload"),
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


@pytest.mark.parametrize(
    ("kind", "settings", "first"),
    [
        pytest.param("nf4", {"window": 1}, "adapters", marks=pytest.mark.long),
        pytest.param("nf4", {"window": 2, "store": "disk"}, "offload", marks=pytest.mark.long),
        pytest.param("int8", {"window": 1}, "adapters", marks=pytest.mark.long),
        pytest.param("int8", {"window": 1}, "offload", marks=pytest.mark.long),
        ("int8", {"window": 2, "store": "disk"}, "offload"),
    ],
    ids=str,
)
def test_dora_reads_the_values_of_quantised_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, settings: dict[str, Any], first: str
) -> None:
    """It puts ``weight.to("cpu")`` in their place, each time it has; of eight bits bitsandbytes loses the scales so."""
    config = peft.LoraConfig(r=2, target_modules="all-linear", use_dora=True)
    torch.manual_seed(0)
    if first == "adapters":
        model = with_adapters(packed(True, kind), config)
        train(model, torch.optim.SGD(trained(model), lr=0.0), steps=1)
        offload(tmp_path, model, **settings)
    else:
        model = with_adapters(offload(tmp_path, packed(True, kind), **settings), config)
    assert any(type(p).__name__ in ("Params4bit", "Int8Params") for p in model.parameters())
    learned = train(model, torch.optim.AdamW(trained(model), lr=1e-2, foreach=False), accumulation=2)
    monkeypatch.setattr(bitsandbytes.nn.Int8Params, "to", lambda weight, device: weight)
    built = packed(True, kind, pack=kind == "nf4")
    if kind == "int8":
        for module in built.modules():
            if isinstance(module, bitsandbytes.nn.Linear8bitLt):
                module.weight = module.weight._quantize(torch.device("cpu"))
                module.init_8bit_state()
    plain = with_adapters(built, config)
    assert train(plain, torch.optim.AdamW(trained(plain), lr=1e-2, foreach=False), accumulation=2) == learned
    for (key, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, other), key


def test_peft_s_preparation_of_a_quantised_model_comes_before_offload() -> None:
    """It makes all that is not packed fp32, and has transformers compute layers again inside of ours."""

    def prepared(model: nn.Module) -> nn.Module:
        model.is_loaded_in_4bit = True  # type: ignore[assignment]
        return peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})

    plain, model = (with_adapters(prepared(packed(True)), LORA) for _ in range(2))
    stronghold.offload(model, device="cpu", window=2)
    losses = [train(one, torch.optim.AdamW(trained(one), lr=1e-2, foreach=False)) for one in (plain, model)]
    assert losses[1] == losses[0]
    late = stronghold.offload(packed(True), device="cpu", window=2)
    with pytest.raises(
        OffloadedModelError, match=r"before offload\(\), where peft\.prepare_model_for_kbit_training\(\) b"
    ):
        prepared(late)
    late = with_adapters(late, LORA)
    assert train(late, torch.optim.AdamW(trained(late), lr=1e-2, foreach=False))  # nothing is lost


@pytest.mark.parametrize(
    ("nested", "kind", "each", "title"),
    [(False, "nf4", 0.5625, "four"), (True, "nf4", 0.516, "four"), (False, "int8", 1 + 4 * 1280 / 188416, "eight")],
)
def test_a_base_takes_what_its_packed_weights_take(nested: bool, kind: str, each: float, title: str) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 320}  # a tensor begins at a multiple of 64 bytes
    model = packed(nested, kind, **shape)
    expected = packed_bytes(model)
    linears = (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)
    linear = sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, linears))
    assert expected / linear == pytest.approx(each, rel=1e-3)
    weights = (bitsandbytes.nn.Params4bit, bitsandbytes.nn.Int8Params)
    others = sum(p.numel() * p.element_size() for p in model.parameters() if not isinstance(p, weights))
    stronghold.offload(model.requires_grad_(False), device="cpu", window=1)
    report = stronghold.report(model)
    assert expected + others <= report.host_bytes <= 1.02 * (expected + others)
    assert report.parameters == sum(p.numel() for p in base(**shape).parameters())
    assert report.dtype == f"bfloat16, weights in {title} bits"


@pytest.mark.parametrize("kind", [pytest.param("nf4", marks=pytest.mark.long), "int8"])
def test_a_checkpoint_of_it_goes_on_to_the_bit(tmp_path: Path, kind: str) -> None:
    def begun(number: int) -> tuple[nn.Module, stronghold.AdamW]:
        base = packed(kind == "nf4", kind)
        model = offload(tmp_path / str(number), with_adapters(base, LORA), window=2, store="disk")
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


@pytest.mark.parametrize(
    ("settings", "ran"),
    crossed([{"window": 1}, {"window": 1, "store": "disk"}, {"resident": 2}], [False, True], together=1),
    ids=str,
)
def test_a_state_dictionary_in_eight_bits_is_loaded(settings: dict[str, Any], ran: bool, tmp_path: Path) -> None:
    """bitsandbytes' own words were that it is not quantised; it had taken the first layer's weight, but no scales."""
    if "store" in settings:
        settings = {**settings, "store": tmp_path}
    other = packed(kind="int8")
    for linear in (m for m in other.modules() if isinstance(m, bitsandbytes.nn.Linear8bitLt)):
        linear.weight.data.copy_(linear.weight.data.roll(1, 0))
        linear.weight.SCB.copy_(2 * linear.weight.SCB.roll(1, 0))
    saved, expected = copy.deepcopy(other.state_dict()), evaluated(other)
    model = packed(kind="int8")
    assert evaluated(packed(kind="int8")) != expected
    stronghold.offload(model, device="cpu", **settings)
    if ran:
        evaluated(model)
    assert str(model.load_state_dict(saved)) == "<All keys matched successfully>"
    assert evaluated(model) == expected
    again = model.state_dict()
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[name], value) for name, value in saved.items())
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*q_proj\.weight"):
        model.load_state_dict({name: value for name, value in saved.items() if "q_proj.weight" not in name})


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_copy_of_it_is_a_model_in_memory(kind: str) -> None:
    def of() -> nn.Module:
        return packed(kind == "nf4", kind)

    model = stronghold.offload(of(), device="cpu", window=1)
    copied = copy.deepcopy(model)
    module, own = copied.model.layers[0].mlp.up_proj, of().model.layers[0].mlp.up_proj
    assert type(module) is type(own)
    assert type(module.weight) is type(own.weight)
    assert evaluated(copied) == evaluated(model) == evaluated(of())
    again = stronghold.offload(copied.train(), device="cpu", window=1)
    assert evaluated(again) == evaluated(model)


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
    with pytest.raises(ValueError, match=r"must be quantised before it moves \(got model\.layers\.0.*torch\.bfloat16"):
        stronghold.offload(packed(kind="int8", pack=False), device="cpu", window=1)
    model = packed(kind="int8")
    model.model.layers[1].mlp.up_proj.weight = bitsandbytes.nn.Int8Params(torch.zeros(160, 64), requires_grad=True)
    with pytest.raises(
        ValueError, match=r"must be quantised before it moves \(got model\.layers\.1\.mlp\.up_proj.*float32"
    ):
        stronghold.offload(model, device="cpu", window=1)
    model = packed(kind="int8")
    model.model.layers[1].mlp.up_proj.state.has_fp16_weights = True
    with pytest.raises(ValueError, match=r"quantised once, not in each step \(got model\.layers\.1\.mlp\.up_proj\.w"):
        stronghold.offload(model, device="cpu", window=1)
    for kind, bits in (("nf4", "four"), ("int8", "eight")):
        model = packed(kind=kind)
        module = model.model.layers[1].mlp.up_proj
        module.forward = module.forward
        with pytest.raises(
            ValueError, match=rf"in {bits} bits must be those of .* forward \(got model\.layers\.1\.mlp"
        ):
            stronghold.offload(model, device="cpu", window=1)


@pytest.mark.parametrize(
    ("kind", "store"),
    [
        pytest.param("nf4", "ram", marks=pytest.mark.long),
        ("nf4_nested", "disk"),
        ("int8", "ram"),
        pytest.param("int8", "disk", marks=pytest.mark.long),
    ],
)
def test_what_is_quantised_while_it_streams_is_what_transformers_quantises(
    tmp_path: Path, kind: str, store: str
) -> None:
    base().save_pretrained(tmp_path / "model")
    asked = config_of(kind)
    expected = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=asked, dtype=torch.bfloat16, device_map="cpu"
    )
    settings = {"store": str(tmp_path / "store")} if store == "disk" else {}
    model = stronghold.load(tmp_path / "model", quantize=kind, device="cpu", window=2, **settings)
    if store == "ram":
        model.save_pretrained(tmp_path / "again")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", device_map="cpu").state_dict()
        assert all(torch.equal(value, again[name]) for name, value in expected.state_dict().items())
    compare(model, expected)


@pytest.mark.parametrize(
    ("kind", "store"),
    [
        pytest.param("nf4", "disk", marks=pytest.mark.long),
        pytest.param("nf4_nested", "ram", marks=pytest.mark.long),
        ("fp4", "ram"),
        ("int8", "disk"),
    ],
)
def test_what_is_quantised_in_the_files_is_what_transformers_reads(tmp_path: Path, kind: str, store: str) -> None:
    base().save_pretrained(tmp_path / "model")
    transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=config_of(kind), dtype=torch.bfloat16, device_map="cpu"
    ).save_pretrained(tmp_path / "quantised")
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "quantised", device_map="cpu")
    settings = {"store": str(tmp_path / "store")} if store == "disk" else {}
    model = stronghold.load(tmp_path / "quantised", device="cpu", window=2, **settings)
    model.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", device_map="cpu").state_dict()
    assert again.keys() == expected.state_dict().keys()
    assert all(torch.equal(value, again[name]) for name, value in expected.state_dict().items())
    compare(model, expected)
    with pytest.raises(ValueError, match=r"quantize is for weights in 16 or 32 bits \(got 'nf4' for"):
        stronghold.load(tmp_path / "quantised", device="cpu", quantize="nf4")


def config_of(kind: str) -> transformers.BitsAndBytesConfig:
    if kind == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind.removesuffix("_nested"),
        bnb_4bit_use_double_quant=kind == "nf4_nested",
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def compare(model: nn.Module, expected: nn.Module) -> None:
    """Holds that a streamed model has the elements of one in memory, and learns the same bits."""
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


def test_files_that_lack_a_part_of_a_quantised_weight_are_refused(tmp_path: Path) -> None:
    base().save_pretrained(tmp_path / "model")
    whole = stronghold.load(tmp_path / "model", quantize="nf4_nested", device="cpu")
    whole.save_pretrained(tmp_path / "quantised")
    file = tmp_path / "quantised" / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    state = tensors[f"{name}.quant_state.bitsandbytes__nf4"]
    for changes, message in [
        (
            {f"{name}.nested_absmax": None},
            rf"must hold all parts of a quantised weight \(in .*missing {name}.nested_abs",
        ),
        (
            {f"{name}.quant_state.bitsandbytes__nf4": state[:-9]},
            rf"must be JSON with its shape \(at .*{name}.quant_state",
        ),
        ({name: tensors[name][:-1].clone()}, rf"{name} of \(5119, 1\), the model's is \(5120, 1\)"),
        ({f"{name}.absmax": tensors[f"{name}.absmax"][:-1].clone()}, rf"{name}.nf4.absmax of \(159,\), the model's"),
    ]:
        altered = {**tensors, **changes}
        safetensors.torch.save_file(
            {key: one for key, one in altered.items() if one is not None}, file, {"format": "pt"}
        )
        with pytest.raises(ValueError, match=message):
            stronghold.load(tmp_path / "quantised", device="cpu")
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    config = tmp_path / "quantised" / "config.json"
    config.write_text(config.read_text().replace('"bitsandbytes"', '"gptq"'))
    with pytest.raises(ValueError, match=r"where they are bitsandbytes' or torchao's \(got .*quantised by 'gptq'\)"):
        stronghold.load(tmp_path / "quantised", device="cpu")


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_modules_with_hooks_of_accelerate_compute_the_same(kind: str) -> None:
    few = peft.LoraConfig(r=2, target_modules=["q_proj"])
    plain, model = (packed(kind == "nf4", kind) for _ in range(2))
    seen = []

    class Seen(accelerate.hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(type(module))
            return args, kwargs

    for layer in model.model.layers:
        accelerate.hooks.add_hook_to_module(layer.mlp.down_proj, Seen())
    gradients = []
    for one in (with_adapters(plain, few), stronghold.offload(with_adapters(model, few), device="cpu", window=1)):
        ids = batches(1)[0]
        one(input_ids=ids, labels=ids).loss.backward()
        gradients.append([parameter.grad for parameter in trained(one)])
    assert len(seen) == 8  # the second run too
    assert all(map(torch.equal, *gradients))


def test_other_kinds_and_models_without_linear_layers_are_refused(tmp_path: Path) -> None:
    base().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"quantize must be 'nf4', 'nf4_nested' or 'int8' \(got 'int3'\)"):
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
