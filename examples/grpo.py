"""TRL's GRPOTrainer on an offloaded model: a small Llama samples answers, and learns those that are rewarded.

python examples/grpo.py
"""

import tempfile

import datasets
import tokenizers
import torch
import transformers
import trl

import stronghold

WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(30))]


def even_words(completions, **_):
    """Returns the share of words with an even number in each completion: the reward."""
    found = [[int(word[1:]) % 2 == 0 for word in text.split() if word[1:].isdigit()] for text in completions]
    return [sum(words) / max(1, len(words)) for words in found]


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
)
model = stronghold.offload(model, window=2, device=device)
optimizer = stronghold.AdamW(model.parameters(), lr=1e-2)

inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, "<pad>"))
inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
prompts = [{"prompt": f"w{number} w{number + 1}"} for number in range(29)]

with tempfile.TemporaryDirectory() as folder:
    arguments = trl.GRPOConfig(
        output_dir=folder,
        max_steps=16,
        lr_scheduler_type="constant",
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=8,
        beta=0.0,  # no reference, and no second model
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=device == "cpu",
        bf16=False,  # the model computes in its own type
        gradient_checkpointing=False,  # the engine recomputes layers
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=even_words,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(prompts),
        processing_class=tokenizer,
        optimizers=(optimizer, None),
    )
    trainer.train()
