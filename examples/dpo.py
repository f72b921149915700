"""TRL's DPOTrainer on an offloaded model with LoRA adapters: a small Qwen3 learns which of two answers is preferred.

The reference is the same model with the adapters as they were, so that there is no second one.

python examples/dpo.py
"""

import tempfile

import datasets
import peft
import tokenizers
import torch
import transformers
import trl

import stronghold

WORDS = ["<pad>", "<eos>", "yes", "no", *(f"w{number}" for number in range(60))]

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = transformers.Qwen3ForCausalLM(
    transformers.Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
)
inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, "<pad>"))
inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
pairs = [{"prompt": f"w{n} w{n + 1} ", "chosen": "yes", "rejected": "no"} for n in range(59)]

with tempfile.TemporaryDirectory() as folder:
    arguments = trl.DPOConfig(
        output_dir=folder,
        max_steps=12,
        per_device_train_batch_size=8,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=device == "cpu",
        bf16=False,  # the model computes in its own type
        gradient_checkpointing=False,  # the engine recomputes layers
        disable_tqdm=True,
    )
    trainer = trl.DPOTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"),
    )
    # The trainer adds the adapters, and a copy of them for the reference: its model is offloaded then.
    stronghold.offload(trainer.model, window=2, device=device)
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    trainer.optimizer = stronghold.AdamW(trained, lr=1e-2)
    trainer.train()
