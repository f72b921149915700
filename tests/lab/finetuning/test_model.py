"""The model of a run has the values of its files, adapters those that PEFT draws; what is no model is told."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPTNeoXConfig, LlamaPreTrainedModel

from stronghold.engine import report
from stronghold.lab.finetuning.model import build_base, place
from stronghold.lab.finetuning.settings import AdapterSettings, FinetuneSettings
from tests.lab.finetuning import runs, small
from tests.lab.finetuning.runs import LORA


def made(wanted: FinetuneSettings) -> Any:
    base = build_base(wanted.model, adapters=wanted.adapters, dtype=wanted.dtype, sequence=wanted.sequence)
    return place(base, wanted, inputs=None)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("adapters", [None, LORA, replace(LORA, targets=("q_proj", "down_proj"))])
def test_it_has_the_values_that_it_has_in_memory(
    tmp_path: Path, kind: str, dtype: str, adapters: AdapterSettings | None
) -> None:
    small.folder(tmp_path / "model", kind)
    model = made(runs.settings(tmp_path, dtype=dtype, adapters=adapters))
    computed = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=computed)
    if adapters is not None:
        torch.manual_seed(3)
        targets: Any = "all-linear" if adapters.targets == ("all-linear",) else list(adapters.targets)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.1, target_modules=targets)
        plain = peft.get_peft_model(plain, config)
    expected = dict(plain.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert parameter.dtype == expected[name].dtype, name
        assert torch.equal(parameter.detach(), expected[name]), name
        assert parameter.requires_grad == (adapters is None or "lora_" in name), name
    assert model.training
    assert report(model).trainable_parameters == sum(p.numel() for p in plain.parameters() if p.requires_grad)


def test_it_keeps_in_fp32_what_from_pretrained_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small.folder(tmp_path / "model", "llama")
    monkeypatch.setattr(LlamaPreTrainedModel, "_keep_in_fp32_modules_strict", ["mlp.gate_proj", "model.norm"])
    found = dict(made(runs.settings(tmp_path, dtype="bf16", adapters=None)).named_parameters())
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    expected = dict(plain.named_parameters())
    assert found.keys() == expected.keys() and len({p.dtype for p in expected.values()}) == 2
    for name, parameter in found.items():
        assert parameter.dtype == expected[name].dtype, name
        assert torch.equal(parameter.detach(), expected[name]), name


def test_a_base_in_four_bits_has_the_values_that_transformers_quantises(tmp_path: Path) -> None:
    small.folder(tmp_path / "model")
    model = made(runs.settings(tmp_path, dtype="bf16", adapters=replace(LORA, quantize="nf4")))
    asked = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    plain: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.bfloat16, quantization_config=asked, device_map="cpu"
    )
    torch.manual_seed(3)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear")
    expected = peft.get_peft_model(plain, config).state_dict()
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


def changed(place: Path, name: str = "config.json", **more: Any) -> None:
    file = place / "model" / name
    file.write_text(json.dumps(json.loads(file.read_text()) | more))


def refused(wanted: FinetuneSettings) -> str:
    with pytest.raises(ValueError) as told:
        made(wanted)
    return str(told.value)


def test_a_folder_that_is_no_model_is_refused_with_the_file(tmp_path: Path) -> None:
    wanted = runs.settings(tmp_path)
    file = tmp_path / "model" / "config.json"
    (tmp_path / "void").mkdir()
    assert "folder with a config.json (got" in refused(replace(wanted, model=str(tmp_path / "void")))
    assert f"at {file}: 64); pass a shorter one" in refused(replace(wanted, sequence=65))
    changed(tmp_path, quantization_config={"quant_method": "bitsandbytes"})
    assert f"(at {file}: a quantization_config of bitsandbytes, and 0 such weights beside it)" in refused(wanted)
    assert f"(at {file}: a quantization_config of bitsandbytes, and 0 such weights beside it)" in refused(
        replace(wanted, adapters=LORA)
    )
    changed(tmp_path, quantization_config=None, model_type="unheard_of")
    assert f"a model must be one that transformers knows (at {file}: " in refused(wanted)
    changed(tmp_path, model_type="stronghold_gpt")
    file.write_text("{")
    assert f"one that can be read (at {file}: Expecting" in refused(wanted)


def test_weights_that_cannot_be_computed_with_or_are_cut_short_are_refused_with_the_file(tmp_path: Path) -> None:
    wanted = runs.settings(tmp_path)
    file = tmp_path / "model" / "model.safetensors"
    whole = file.read_bytes()
    tensors = safetensors.torch.load(whole)
    name = "model.layers.1.mlp.up_proj.weight"
    safetensors.torch.save_file(tensors | {name: tensors[name].to(torch.int8)}, file)
    assert f"(at {file}: {name} is I8)" in refused(wanted)
    safetensors.torch.save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, file)
    assert f"(at {file}: {name} is F8_E4M3)" in refused(replace(wanted, adapters=LORA))
    file.write_bytes(whole[:-100])
    assert f"cannot read {str(file)!r}" in refused(wanted)
    file.unlink()
    assert "a checkpoint must be a folder with model.safetensors" in refused(wanted)


def test_what_transformers_passes_over_in_the_files_may_be_of_any_type(tmp_path: Path) -> None:
    """Files of Pythia hold the causal masks of its layers, called attention.bias, as booleans."""
    wanted = runs.settings(tmp_path)
    config = GPTNeoXConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = safetensors.torch.load(file.read_bytes())
    masks = {f"gpt_neox.layers.{layer}.attention.bias": torch.ones(1, 1, 4, 4).bool() for layer in range(2)}
    safetensors.torch.save_file(tensors | masks, file)
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for (name, found), expected in zip(made(wanted).named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.detach(), expected), name


def test_a_type_that_no_kernel_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype must be 'fp32' or 'bf16' \(got 'fp16'\)"):
        runs.settings(tmp_path, dtype="fp16")


def test_adapters_of_another_model_are_refused_with_the_file(tmp_path: Path) -> None:
    wanted = runs.settings(tmp_path)
    made_for = peft.get_peft_model(
        small.model(), peft.LoraConfig(r=2, target_modules=["up_proj"], task_type="CAUSAL_LM")
    )
    made_for.save_pretrained(tmp_path / "adapter")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    given = replace(wanted, adapters=AdapterSettings(path=str(tmp_path / "adapter")))
    made(given)
    tensors = safetensors.torch.load_file(weights)
    name = "base_model.model.model.layers.2.mlp.up_proj.lora_B.weight"
    other = {name: torch.zeros(7, 2)}
    safetensors.torch.save_file(tensors | other, weights)
    told = refused(given)
    assert f"must be of the model that is trained (at {weights}: {name} of (7, 2); the model has" in told
    assert "model.layers.2.mlp.up_proj.weight of (32, 16)" in told
    renamed = {key.replace("layers.2", "layers.9"): value for key, value in tensors.items()}
    safetensors.torch.save_file(renamed, weights)
    assert "the model has no such layer" in refused(given)
    fewer = {key: value for key, value in tensors.items() if "layers.2" not in key}
    safetensors.torch.save_file(fewer, weights)
    assert "none of 2 tensors, such as base_model.model.model.layers.2.mlp.up_proj.lora_A.weight" in refused(given)
    safetensors.torch.save_file(tensors, weights)
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"r": 3}))
    assert f"must be those that their adapter_config.json describes, of the model that is trained (at {weights}" in (
        refused(given)
    )
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    assert f"must be plain LoRA (at {config}: LORA, use_dora=True" in refused(given)
    config.write_text("[]")
    assert f"adapters' configuration must be one of PEFT's (at {config}: " in refused(given)
    weights.unlink()
    assert f"(got none at {weights})" in refused(given)


def test_a_folder_of_adapters_is_no_model(tmp_path: Path) -> None:
    wanted = runs.settings(tmp_path)
    (tmp_path / "adapter").mkdir()
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "adapter" / "adapter_config.json")
    told = refused(replace(wanted, model=str(tmp_path / "adapter")))
    assert f"which holds adapters alone); pass the model that they are of, and --adapter {tmp_path / 'adapter'}" in told


def test_targets_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    wanted = runs.settings(tmp_path, adapters=replace(LORA, targets=("nowhere",)))
    assert "adapters go to linear layers of the model (got --targets nowhere" in refused(wanted)
    wanted = replace(wanted, adapters=replace(LORA, targets=("q_proj", "mlp.nope", "up_proj", "proj")))
    assert "(got --targets q_proj,mlp.nope,up_proj,proj, and no layer is called mlp.nope or proj)" in refused(wanted)
    wanted = replace(wanted, adapters=replace(LORA, targets=("q_proj", "input_layernorm")))
    assert "(got --targets q_proj,input_layernorm: Target module LlamaRMSNorm" in refused(wanted)
