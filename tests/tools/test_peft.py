"""Models with adapters of PEFT's learn offloaded what they learn in memory (tests/test_adapters.py saves them)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import stronghold
from stronghold.errors import OffloadedModelError
from stronghold.trainer import KeepEverything
from tests.reference import CASES, differences, snapshot, train
from tests.test_trainer import Samples

CASE = CASES["llama"]
TARGETS = ["q_proj", "v_proj", "down_proj"]
CONFIGS: dict[str, peft.PeftConfig] = {
    "lora": peft.LoraConfig(r=4, target_modules=TARGETS, lora_dropout=0.1),
    "dora": peft.LoraConfig(r=4, target_modules=TARGETS, use_dora=True),
    "lora and a whole module": peft.LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["lm_head"]),
    "ia3": peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"]),
    "prompts": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
}


def adapted(config: peft.PeftConfig) -> nn.Module:
    torch.manual_seed(1)
    return peft.get_peft_model(CASE.model(3), config).train()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_learn_what_they_learn_in_memory(name: str) -> None:
    plain, model = adapted(CONFIGS[name]), stronghold.offload(adapted(CONFIGS[name]), device="cpu", window=2)
    frozen = {key: value.clone() for key, value in model.state_dict().items() if "base_layer" in key}
    losses = []
    for one, adamw in ((plain, torch.optim.AdamW), (model, stronghold.AdamW)):
        losses.append(train(one, adamw(trained(one), lr=1e-2), CASE.batches(6), accumulation=2, clip=0.5))
    assert len(set(losses[0])) == 6
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    for (key, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.dist(parameter, other) <= 1e-4 * other.norm() + 1e-6, key
    assert all(torch.equal(model.state_dict()[key], value) for key, value in frozen.items())


@pytest.mark.parametrize("settings", [{"window": 1}, {"window": "auto"}, {"window": 2, "store": "disk"}], ids=str)
@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_every_window_store_and_update_trains_the_same_bits(
    tmp_path: Path, settings: dict[str, Any], update: str
) -> None:
    found = []
    for number, one in enumerate(({"window": 2}, settings)):
        one = {**one, **({"store": str(tmp_path / str(number))} if "store" in one else {})}
        model = stronghold.offload(adapted(CONFIGS["lora"]), device="cpu", dtype=torch.bfloat16, **one)
        optimizer = stronghold.AdamW(trained(model), lr=1e-2, update="deferred" if number == 0 else update)
        losses = train(model, optimizer, CASE.batches(4))
        found.append((losses, snapshot(model, optimizer)))
    assert found[1][0] == found[0][0]
    assert differences(found[1][1], found[0][1]) == []


def test_a_run_of_the_trainer_with_adapters_resumes_to_the_bit(tmp_path: Path) -> None:
    def run(resume: str | None = None) -> tuple[nn.Module, stronghold.AdamW]:
        model = stronghold.offload(adapted(CONFIGS["lora"]), device="cpu", window=2, dtype=torch.bfloat16)
        optimizer = stronghold.AdamW(trained(model), lr=1e-2)
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=6, save_steps=3, use_cpu=True, report_to=[], disable_tqdm=True
        )
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=Samples(CASE, 16),
            optimizers=(optimizer, None),
            callbacks=[KeepEverything()],
        )
        trainer.train(resume_from_checkpoint=resume)
        return model, optimizer

    whole = snapshot(*run())  # Trainer loads adapters by load_adapter(), which makes new parameters
    assert (tmp_path / "checkpoint-3" / "adapter_model.safetensors").is_file()
    assert differences(snapshot(*run(str(tmp_path / "checkpoint-3"))), whole) == []


def test_a_resumed_run_with_adapters_in_bf16_names_what_keeps_them(tmp_path: Path) -> None:
    """PEFT's ``load_adapter``, by which Trainer resumes, makes fp32 adapters in the place of those in bf16."""

    def run(resume: str | None = None, kept: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = peft.get_peft_model(CASE.model().bfloat16(), CONFIGS["lora"], autocast_adapter_dtype=False)
        model = stronghold.offload(model, device="cpu", window=2)
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=4, save_steps=2, use_cpu=True, report_to=[], disable_tqdm=True
        )
        more: dict[str, Any] = {"optimizer_cls_and_kwargs": (stronghold.AdamW, {"lr": 1e-2})}
        if kept:
            more = {"optimizers": (stronghold.AdamW(trained(model), lr=1e-2), None), "callbacks": [KeepEverything()]}
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Samples(CASE, 16), **more)
        trainer.train(resume_from_checkpoint=resume)
        return model, trainer.optimizer.optimizer

    run()
    with pytest.raises(OffloadedModelError, match=r"give Trainer optimizers=\(stronghold\.AdamW.*KeepEverything\(\)\]"):
        run(str(tmp_path / "checkpoint-2"))
    whole = snapshot(*run(kept=True))
    assert differences(snapshot(*run(str(tmp_path / "checkpoint-2"), kept=True)), whole) == []
