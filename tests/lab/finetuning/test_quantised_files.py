"""A model whose files are quantised is a base for adapters: its runs learn the bits that TRL learns in memory."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import bitsandbytes
import peft
import pytest
import safetensors.torch
import torch
from torch import nn
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from stronghold.lab.finetuning import run as runner
from stronghold.lab.finetuning import trainer as trainers
from stronghold.lab.finetuning.settings import FinetuneSettings
from stronghold.settings import OffloadSettings
from tests.lab.finetuning import runs, small
from tests.lab.finetuning.runs import LORA, PAIRS
from tests.lab.finetuning.test_model import refused
from tests.lab.finetuning.test_resuming import stop_after
from tests.lab.finetuning.test_run import of_trl, theirs

KINDS: dict[str, Any] = {
    "nf4": BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    ),
    "int8": BitsAndBytesConfig(load_in_8bit=True),
    "torchao int8": TorchAoConfig(Int8WeightOnlyConfig()),
    "torchao float8": TorchAoConfig(Float8WeightOnlyConfig()),
}


def in_memory(folder: Path | str, **more: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cpu", **more)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns a folder for each kind, as save_pretrained writes it."""
    place = tmp_path_factory.mktemp("quantised")
    plain = small.folder(place / "plain")
    found = {}
    for kind, config in KINDS.items():
        found[kind] = place / kind.replace(" ", "-")
        in_memory(plain, quantization_config=config).save_pretrained(found[kind])
        small.tokenizer().save_pretrained(found[kind])
    return found


def settings(place: Path, model: Path, **more: Any) -> FinetuneSettings:
    """Returns the settings of a run of six steps over the quantised ``model``."""
    given = {"adapters": LORA, "dtype": "bf16", "offload": OffloadSettings(window=2), "epochs": 1.0, **more}
    return replace(runs.settings(place), model=str(model), **given)


PLANNED = ("nf4", "torchao int8")


def with_adapters(wanted: FinetuneSettings) -> nn.Module:
    """Returns the quantised model in memory, with PEFT's adapters."""
    base = in_memory(wanted.model)
    for module in base.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False  # else evaluation computes with other bits
    torch.manual_seed(wanted.seed)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear")
    model = peft.get_peft_model(base, config)
    base.is_loaded_in_4bit = base.is_loaded_in_8bit = False  # TRL would round the adapters to bf16
    return model


def adapters_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}


@pytest.mark.parametrize("kind", KINDS)
def test_its_losses_are_trls_planned_or_not_and_peft_loads_its_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path], kind: str
) -> None:
    monkeypatch.setattr(trainers, "_optimizer", theirs)
    offload = OffloadSettings(window="auto" if kind in PLANNED else 1)  # to plan all takes the search its seconds
    wanted = settings(tmp_path, folders[kind], plans=kind in PLANNED, offload=offload)
    shown = runs.run(wanted)
    assert ("planner" in shown[: shown.index("step     1/6")]) == (kind in PLANNED)
    expected, model = of_trl(wanted, PAIRS, with_adapters(wanted))
    assert len(set(expected)) == len(expected) == 6
    assert runs.losses(wanted) == expected
    saved = adapters_of(peft.PeftModel.from_pretrained(in_memory(wanted.model), wanted.save))
    assert len(saved) == 2 * 7 * 3
    for name, value in adapters_of(model).items():
        assert torch.equal(saved[name], value), name


@pytest.mark.parametrize("kind", ["nf4", "torchao int8"])
def test_after_an_interrupt_it_goes_on_to_the_bit_in_another_window_and_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path], kind: str
) -> None:
    whole = settings(tmp_path, folders[kind])
    runs.run(whole)
    expected = runs.losses(whole)
    wanted = replace(whole, out=str(tmp_path / "stopped"), save=str(tmp_path / "stopped-model"))
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        assert runner.finetune(wanted).interrupted
    assert runs.losses(wanted) == expected[:3]
    place = OffloadSettings(window=1, store=str(tmp_path / "store"))
    runs.run(replace(wanted, resume=True, offload=place))
    assert runs.losses(wanted) == expected
    one, other = (safetensors.torch.load_file(Path(run.save) / "adapter_model.safetensors") for run in (whole, wanted))
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_what_asks_too_much_of_quantised_weights_is_told_with_the_file(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    for kind, its in (("nf4", "nf4"), ("int8", "int8"), ("torchao int8", "Int8Tensor")):
        wanted = settings(tmp_path, folders[kind])
        where = f"at {folders[kind] / 'model.safetensors'}: {name} is {its})"
        told = refused(replace(wanted, adapters=None))
        assert f"quantised weights cannot be trained ({where}; pass --lora to train adapters beside them" in told
        told = refused(replace(wanted, adapters=replace(LORA, quantize="nf4")))
        assert f"--quantize is for weights in 16 or 32 bits (got nf4, {where}; leave it out" in told
    told = refused(settings(tmp_path, folders["torchao float8"], dtype="fp32"))
    assert f"a quantised base must compute in --dtype (got fp32, at {folders['torchao float8']}: " in told
    assert "Float8Tensor of torch.bfloat16, which with an input in torch.float32 on cpu has none: " in told
    assert "compute in torch.bfloat16, or quantise" in told


def test_files_of_a_method_that_is_not_read_or_that_lack_a_part_are_told(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    shutil.copytree(folders["torchao int8"], tmp_path / "other")
    wanted = settings(tmp_path, tmp_path / "other")
    file, config = tmp_path / "other" / "model.safetensors", tmp_path / "other" / "config.json"
    with safetensors.safe_open(str(file), framework="pt") as opened:
        tensors, notes = {name: opened.get_tensor(name) for name in opened.keys()}, dict(opened.metadata())  # noqa: SIM118
    name = "model.layers.1.mlp.up_proj"
    lacking = {key: value for key, value in tensors.items() if key != f"{name}._weight_scale"}
    for changed, their_notes, message in (
        (
            lacking,
            notes,
            f"must hold all parts of a quantised weight (in '{file.parent}' missing {name}._weight_scale)",
        ),
        (
            tensors,
            {**notes, f"{name}.weight": notes[f"{name}.weight"].replace("Int8Tensor", "Int3Tensor")},
            f"of a class that the installed torchao knows (got {name}.weight in '{file.parent}', a Int3Tensor: ",
        ),
        (
            tensors,
            {**notes, f"{name}.weight": notes[f"{name}.weight"][:-1]},
            f"what torchao says of a weight must be JSON with its class (in '{file.parent}', {name}.weight: ",
        ),
    ):
        safetensors.torch.save_file(changed, file, their_notes)
        assert message in refused(wanted)
    safetensors.torch.save_file(tensors, file, notes)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "gptq"}}))
    told = refused(wanted)
    assert f"can be read where they are bitsandbytes' or torchao's (at {config}: a quantization_config of gptq" in told
