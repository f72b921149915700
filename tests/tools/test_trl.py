"""TRL's trainers train an offloaded model as they train any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes
import datasets
import peft
import pytest
import torch
import transformers
import trl
from torch import nn

import stronghold
from tests.reference import CASES
from tests.tools.text import SETTINGS, preferences, sentence, texts, tokenizer

CASE = CASES["llama"]
LORA = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])


def ours(model: nn.Module) -> stronghold.AdamW:
    return stronghold.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.0)


def theirs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.0)


def sft(directory: Path, model: nn.Module, **more: Any) -> trl.SFTTrainer:
    arguments = trl.SFTConfig(str(directory), **SETTINGS)
    return trl.SFTTrainer(model=model, args=arguments, train_dataset=texts(), processing_class=tokenizer(), **more)


def dpo(directory: Path, model: nn.Module, reference: nn.Module | None, **more: Any) -> trl.DPOTrainer:
    arguments = trl.DPOConfig(str(directory), **SETTINGS)
    return trl.DPOTrainer(
        model=model,
        ref_model=reference,
        args=arguments,
        train_dataset=preferences(),
        processing_class=tokenizer(),
        **more,
    )


def grpo(directory: Path, model: nn.Module, **more: Any) -> trl.GRPOTrainer:
    settings = SETTINGS | {"per_device_train_batch_size": 4}
    del settings["max_length"]
    arguments = trl.GRPOConfig(
        str(directory), num_generations=4, max_completion_length=4, beta=0.0, gradient_checkpointing=False, **settings
    )
    prompts = datasets.Dataset.from_list([{"prompt": sentence(number, 3)} for number in range(16)])
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [sum(map(ord, text)) % 7 / 7 for text in completions],
        args=arguments,
        train_dataset=prompts,
        processing_class=tokenizer(),
        **more,
    )


def losses(trainer: Any) -> list[float]:
    torch.manual_seed(5)  # its own seed was set when it was made, and dropout has been drawn since
    trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(found) == 6
    assert len(set(found)) > 1
    return found


def assert_alike(trainer: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(losses(trainer), losses(expected), rtol=tolerance, atol=1e-6)
    for (name, parameter), other in zip(trainer.model.named_parameters(), expected.model.parameters(), strict=True):
        if other.is_floating_point():
            assert torch.dist(parameter, other) <= 1e-4 * other.norm(), name
        else:
            assert torch.equal(parameter, other), name


@pytest.fixture
def plain() -> nn.Module:
    return CASE.model()


@pytest.fixture
def offloaded() -> nn.Module:
    return stronghold.offload(CASE.model(), device="cpu", window=2)


def test_sft_trains_an_offloaded_model(tmp_path: Path, plain: nn.Module, offloaded: nn.Module) -> None:
    trainer = sft(tmp_path, offloaded, optimizers=(ours(offloaded), None))
    assert_alike(trainer, sft(tmp_path, plain, optimizers=(theirs(plain), None)))


def test_sft_trains_adapters_that_were_there_before(tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain = peft.get_peft_model(CASE.model(), LORA)
    torch.manual_seed(1)
    model = stronghold.offload(peft.get_peft_model(CASE.model(), LORA), device="cpu", window=2)
    trainer = sft(tmp_path, model, optimizers=(ours(model), None))
    assert_alike(trainer, sft(tmp_path, plain, optimizers=(theirs(plain), None)))


@pytest.mark.parametrize(
    "made", [sft, lambda *given, **more: dpo(*given, None, **more), grpo], ids=["sft", "dpo", "grpo"]
)
@pytest.mark.parametrize("first", ["the model", "the adapters"])
def test_adapters_over_a_base_in_four_bits_stay_fp32(tmp_path: Path, made: Any, first: str) -> None:
    """TRL rounds the adapters of a base that says that it is in four bits: the reference does not say so."""
    CASE.model().save_pretrained(tmp_path / "model")
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    config.bnb_4bit_compute_dtype = torch.float32

    def in_memory() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", quantization_config=config, dtype=torch.float32, device_map="cpu"
        )

    def adapted(model: Any) -> Any:
        for module in model.modules():
            if isinstance(module, bitsandbytes.nn.Linear4bit):
                module.support_avx512bf16_for_cpu = False  # else evaluation computes with other bits
        torch.manual_seed(1)
        return peft.get_peft_model(model, LORA)

    plain = adapted(in_memory())
    plain.get_base_model().is_loaded_in_4bit = False
    if first == "the model":
        model = adapted(stronghold.load(tmp_path / "model", quantize="nf4", device="cpu", window=2).train())
    else:
        model = stronghold.offload(adapted(in_memory()), device="cpu", window=2)
    trainer = made(tmp_path, model, optimizers=(ours(model), None))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert_alike(trainer, made(tmp_path, plain, optimizers=(theirs(plain), None)))


def test_an_optimizer_that_is_there_before_the_adapters_leaves_the_mark_to_peft(tmp_path: Path) -> None:
    CASE.model().save_pretrained(tmp_path / "model")
    base = stronghold.load(tmp_path / "model", quantize="nf4", device="cpu", window=2).train()
    optimizer = stronghold.AdamW([p for p in base.parameters() if p.requires_grad])
    assert base.is_loaded_in_4bit
    model = peft.get_peft_model(base, LORA)
    assert any(isinstance(module, peft.tuners.lora.bnb.Linear4bit) for module in model.modules())
    optimizer.add_param_group({"params": [p for n, p in model.named_parameters() if "lora_" in n]})
    assert not getattr(base, "is_loaded_in_4bit", False)


def test_the_trainer_adds_adapters_first_and_its_model_is_offloaded_then(tmp_path: Path, plain: nn.Module) -> None:
    made: list[trl.SFTTrainer] = []
    for model in (CASE.model(), plain):
        torch.manual_seed(1)
        made.append(sft(tmp_path, model, peft_config=LORA))
    trainer, expected = made
    stronghold.offload(trainer.model, device="cpu", window=2)
    trainer.optimizer, expected.optimizer = ours(trainer.model), theirs(expected.model)
    assert_alike(trainer, expected)


def test_adapters_that_the_trainer_adds_to_an_offloaded_model_train(
    tmp_path: Path, plain: nn.Module, offloaded: nn.Module
) -> None:
    made: list[trl.SFTTrainer] = []
    for model in (offloaded, plain):
        torch.manual_seed(1)
        made.append(sft(tmp_path, model, peft_config=LORA))
    trainer, expected = made
    trainer.optimizer, expected.optimizer = ours(trainer.model), theirs(expected.model)
    assert_alike(trainer, expected)


@pytest.mark.parametrize("reference_is", ["offloaded", "plain"])
def test_dpo_trains_an_offloaded_model(
    tmp_path: Path, plain: nn.Module, offloaded: nn.Module, reference_is: str
) -> None:
    reference = CASE.model()
    if reference_is == "offloaded":
        stronghold.offload(reference, device="cpu", window=1)
    trainer = dpo(tmp_path, offloaded, reference, optimizers=(ours(offloaded), None))
    assert_alike(trainer, dpo(tmp_path, plain, CASE.model(), optimizers=(theirs(plain), None)))


def test_grpo_trains_an_offloaded_model(tmp_path: Path, plain: nn.Module, offloaded: nn.Module) -> None:
    trainer = grpo(tmp_path, offloaded, optimizers=(ours(offloaded), None))
    expected = grpo(tmp_path, plain, optimizers=(theirs(plain), None))
    assert_alike(trainer, expected)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert rewards == [entry["reward"] for entry in expected.state.log_history if "reward" in entry]
    assert len(set(rewards)) > 1
