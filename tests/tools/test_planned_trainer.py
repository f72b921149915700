"""transformers' Trainer over a model that nobody has made settings for: its first batch says what they are."""

import peft
import pytest
import torch
import transformers

import stronghold
from stronghold.device.throttled import Speed, ThrottledDevice
from tests.planner.machines import machine

CONFIG = transformers.LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, number):
        ids = torch.arange(16) + number % 5
        return {"input_ids": ids, "labels": ids}


def trained(tmp_path, *, lora, bf16, **settings):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(CONFIG)
    if lora:
        of_layers = peft.LoraConfig(target_modules="all-linear", r=4, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, of_layers)
    device = ThrottledDevice(Speed(flops=1e12, up=1e10, down=1e10, host=1e10), tokens=32)
    stronghold.offload(model, device=device, **settings)
    optimizer = stronghold.AdamW([p for p in model.parameters() if p.requires_grad])
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=bf16,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Rows(), optimizers=(optimizer, None))
    trainer.train()
    return stronghold.report(model), [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize(
    ("lora", "bf16"), [(False, True), (True, False), pytest.param(True, True, marks=pytest.mark.long)]
)
def test_losses_are_those_of_a_window(tmp_path, monkeypatch, lora, bf16):
    there = machine(device_memory_bytes=2**30)
    monkeypatch.setattr("stronghold.engine.planning.auto.kept_machine", lambda device: there)
    report, losses = trained(tmp_path, lora=lora, bf16=bf16)
    assert report.resident == 4
    other, expected = trained(tmp_path, lora=lora, bf16=bf16, window=2)
    assert other.planned is None
    assert losses == expected
