"""Small models with a tokenizer of words and a chat template, in a folder as people have them. Holds no tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

WORDS = [f"w{number}" for number in range(40)] + ["system", "user", "assistant", "be", "kind"]
SPECIAL = ["<pad>", "<eos>", "<unk>", "<|", "|>"]
TEMPLATE = (
    "{% for message in messages %}<| {{ message['role'] }} {{ message['content'] }} |>{% endfor %}"
    "{% if add_generation_prompt %}<| assistant{% endif %}"
)
MARKED = (
    "{% for message in messages %}<| {{ message['role'] }} "
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }} |>{% endgeneration %}"
    "{% else %}{{ message['content'] }} |>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<| assistant{% endif %}"
)


def tokenizer(template: str | None = TEMPLATE, eos: str | None = "<eos>") -> Any:
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([*SPECIAL])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token=eos, unk_token="<unk>", chat_template=template
    )


CONFIGS: dict[str, Any] = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 8}),
    "mixture": (
        transformers.Qwen3MoeConfig,
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    ),
}


def model(kind: str = "llama", *, longest: int = 64, **more: Any) -> Any:
    made, own = CONFIGS[kind]
    config = made(
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=longest,
        tie_word_embeddings=False,
        dtype="float32",
        **own,
        **more,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def folder(place: Path, kind: str = "llama", template: str | None = TEMPLATE, **more: Any) -> Path:
    """Writes a model with its tokenizer into ``place`` and returns that."""
    model(kind, **more).save_pretrained(place)
    tokenizer(template).save_pretrained(place)
    return place


def words(begin: int, count: int, step: int = 1) -> str:
    return " ".join(f"w{(begin + step * number) % 40}" for number in range(count))


def chats(count: int, turns: int = 1) -> list[dict[str, Any]]:
    """Returns rows of messages, each of another length."""
    return [
        {
            "messages": [
                message
                for turn in range(turns)
                for message in (
                    {"role": "user", "content": words(row + turn, 2 + row % 3)},
                    {"role": "assistant", "content": words(row + turn, 1 + row % 4, 3)},
                )
            ]
        }
        for row in range(count)
    ]


def write_lines(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file
