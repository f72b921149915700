"""transformers.Trainer on an offloaded model, unchanged: a small GPT-2 on a few random samples.

python examples/trainer.py
"""

import tempfile

import torch
import transformers

import stronghold

device = "cuda" if torch.cuda.is_available() else "cpu"
model = transformers.GPT2LMHeadModel(
    transformers.GPT2Config(vocab_size=1000, n_embd=128, n_layer=8, n_head=4, n_positions=64)
)
model = stronghold.offload(model, window=2, device=device)
optimizer = stronghold.AdamW(model.parameters(), lr=1e-3)
scheduler = transformers.get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=10)

samples = [{"input_ids": row, "labels": row} for row in torch.randint(0, 1000, (8, 64)).repeat(10, 1)]
with tempfile.TemporaryDirectory() as folder:
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=10,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=device == "cpu",
    )
    transformers.Trainer(model=model, args=arguments, train_dataset=samples, optimizers=(optimizer, scheduler)).train()
