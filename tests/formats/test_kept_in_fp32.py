"""What transformers keeps in fp32 beside 16 bits: a router's bias, in a model that is loaded, tuned, or quantised."""

from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import nn

import stronghold
from stronghold.formats.kept_in_fp32 import keep_in_fp32
from stronghold.formats.model_config import build
from tests import experts

IDS = torch.arange(2, 34).view(2, 16)
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


ROUTER = "model.layers.1.mlp.gate.weight"


class KeptNorms(nn.Sequential):
    """A row of layers that says what it keeps in fp32 as transformers' models do."""

    def __init__(self, size: int = 8) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(size, size), nn.LayerNorm(size)) for _ in range(3)))

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        return {"*.1.weight": torch.float32} if dtype is torch.bfloat16 else {}


def saved(folder: Path, strict: list[str] | None = None) -> Path:
    """Saves a mixture in bf16 whose router's biases, close to one another, are fp32 in the files, as DeepSeek's are."""
    model: Any = experts.model("deepseek", torch.bfloat16).eval()
    gate = model.get_submodule(BIAS.rpartition(".")[0])
    torch.manual_seed(3)
    gate._buffers["e_score_correction_bias"] = 5 + 0.02 * torch.randn(experts.EXPERTS)
    for name in strict or ():
        model.get_parameter(name).data = model.get_parameter(name).detach().float() + 0.001
    model.config.dtype = "bfloat16"
    model.save_pretrained(folder)
    return folder


def on_meta(folder: Path) -> nn.Module:
    with accelerate.init_empty_weights(include_buffers=False):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)).eval()


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype is value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("how", ["load", "weights"])
def test_a_router_keeps_its_bias_as_from_pretrained_has_it(tmp_path: Path, how: str) -> None:
    folder = saved(tmp_path / "base")
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert plain.get_buffer(BIAS).dtype is torch.float32
    if how == "load":
        model: Any = stronghold.load(folder, device="cpu", window=1)
    else:
        model = stronghold.offload(on_meta(folder), device="cpu", window=1, weights=folder)
    assert_same(tensors(model), tensors(plain))
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
    stronghold.save(model, tmp_path / "again")
    assert_same(load_file(tmp_path / "again/model.safetensors"), load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("how", ["load", "weights"])
def test_a_parameter_that_transformers_keeps_in_fp32_is_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    kept = [f"model.layers.{number}.self_attn.o_proj.weight" for number in range(2)]
    folder = saved(tmp_path / "base", kept)
    strict = ["e_score_correction_bias", "layers.*.o_proj.weight"]
    monkeypatch.setattr(transformers.DeepseekV3PreTrainedModel, "_keep_in_fp32_modules_strict", strict)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert {plain.get_parameter(name).dtype for name in kept} == {torch.float32}
    if how == "load":
        model = stronghold.load(folder, device="cpu", window=1)
    else:
        model = on_meta(folder)
        adapted = peft.get_peft_model(on_meta(folder), peft.LoraConfig(r=2, target_modules=["o_proj"]))
        keep_in_fp32(adapted)
        found = {n: p.dtype for n, p in adapted.named_parameters() if "o_proj.base_layer" in n}
        assert set(found.values()) == {torch.float32}
        before = {name: id(parameter) for name, parameter in model.named_parameters()}
        stronghold.offload(model, device="cpu", window=1, weights=folder)
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert_same(tensors(model), tensors(plain))


@pytest.mark.parametrize("how", ["load", "weights", "built in fp32"])
def test_a_compute_type_of_16_bits_rounds_none_of_them(tmp_path: Path, how: str) -> None:
    """As ``from_pretrained(dtype=)`` does; the routers of Ernie were rounded, and saved so."""
    whole: Any = experts.ernie()
    for name, parameter in whole.named_parameters():
        parameter.data = (
            parameter.data if "mlp.gate.weight" in name or "moe_statics" in name else parameter.data.bfloat16()
        )
    whole.config.dtype = "bfloat16"
    whole.save_pretrained(tmp_path / "base")
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16).eval()
    assert plain.get_parameter(ROUTER).dtype is torch.float32
    settings: Any = {"device": "cpu", "dtype": torch.bfloat16}
    if how == "load":
        model: Any = stronghold.load(tmp_path / "base", window=1, **settings)
    else:
        model = on_meta(tmp_path / "base")
        model = model if how == "weights" else model.float()
        model = stronghold.offload(model, window=1, weights=tmp_path / "base", **settings)
    assert_same(tensors(model), tensors(plain))
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
    stronghold.save(model, tmp_path / "again")
    assert_same(load_file(tmp_path / "again/model.safetensors"), load_file(tmp_path / "base/model.safetensors"))


@pytest.mark.parametrize("built", [torch.float32, torch.bfloat16])
def test_stages_round_none_of_them(tmp_path: Path, request: pytest.FixtureRequest, built: torch.dtype) -> None:
    plain = KeptNorms()
    for parameter in plain.parameters():
        parameter.data.uniform_()
    stronghold.save(plain, tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    request.addfinalizer(dist.destroy_process_group)
    model = stronghold.pipeline(
        KeptNorms().to(built),
        loss=nn.functional.mse_loss,
        stages=1,
        micro_batches=1,
        balance="layers",
        weights=tmp_path,
        device="cpu",
        dtype=torch.bfloat16,
    )
    kept = {name for name, _ in plain.named_parameters() if name.endswith("1.weight")}
    assert len(kept) == 3
    expected = {n: p.data if n in kept else p.data.bfloat16() for n, p in plain.named_parameters()}
    assert_same(tensors(model), expected)


def test_only_what_is_fp32_stays_so() -> None:
    model: Any = experts.ernie()
    router = model.get_parameter(ROUTER)
    stronghold.offload(model, device="cpu", window=1, dtype=torch.bfloat16)
    assert router.dtype is torch.float32 and model.lm_head.weight.dtype is torch.bfloat16
    rounded: Any = experts.ernie().bfloat16()
    stronghold.offload(rounded, device="cpu", window=1, dtype=torch.bfloat16)
    assert {p.dtype for p in rounded.parameters()} == {torch.bfloat16}
    whole: Any = experts.ernie().bfloat16()
    stronghold.offload(whole, device="cpu", window=1, dtype=torch.float32)
    assert {p.dtype for p in whole.parameters()} == {torch.float32}


def test_a_model_that_is_asked_for_in_fp32_and_one_without_values_are_as_they_are(tmp_path: Path) -> None:
    folder = saved(tmp_path / "base")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = build(folder / "config.json", dtype=torch.float32)
    expected = {name: tensor.dtype for name, tensor in plain.state_dict().items()}
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == expected
    bare = nn.Linear(2, 2, dtype=torch.bfloat16)
    keep_in_fp32(bare)
    assert bare.weight.dtype is torch.bfloat16


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_what_transformers_leaves_out_where_it_quantises_is_left_out(tmp_path: Path, kind: str) -> None:
    size = {"d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 64, "num_layers": 2, "vocab_size": 64}
    torch.manual_seed(1)
    whole = transformers.T5ForConditionalGeneration(transformers.T5Config(**size)).to(torch.bfloat16)
    whole.config.dtype = "bfloat16"
    whole.save_pretrained(tmp_path / "model")
    asked = {"nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "int8": {"load_in_8bit": True}}[kind]
    if kind == "nf4":
        asked["bnb_4bit_compute_dtype"] = torch.bfloat16
    plain = transformers.T5ForConditionalGeneration.from_pretrained(
        tmp_path / "model", quantization_config=transformers.BitsAndBytesConfig(**asked), device_map="cpu"
    )
    model = stronghold.load(
        tmp_path / "model",
        model_class=transformers.T5ForConditionalGeneration,
        quantize=kind,
        device="cpu",
        window=1,
    )
    kinds = {name: type(module).__name__ for name, module in plain.named_modules()}
    assert kinds["decoder.block.1.layer.2.DenseReluDense.wo"] == "Linear"
    assert {name: type(module).__name__ for name, module in model.named_modules()} == kinds
    expected = dict(plain.named_parameters())
    assert [name for name, p in model.named_parameters() if not torch.equal(p, expected[name])] == []
    for module in plain.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = (
                False  # to evaluate, it repacks the bytes for a kernel that rounds otherwise
            )
    ids = torch.arange(2, 18).view(1, 16)
    with torch.no_grad():
        logits = [one(input_ids=ids, decoder_input_ids=ids).logits for one in (plain, model)]
    assert torch.equal(*logits)
