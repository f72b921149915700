"""A tokenizer and texts for the trainers of other libraries, made here: no test needs a hub."""

from __future__ import annotations

from typing import Any

import datasets
import tokenizers
import transformers

from tests.reference import SEQUENCE, VOCABULARY

WORDS = [f"w{number}" for number in range(2, VOCABULARY)]


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Returns one that knows the words w2, w3, ... by their numbers."""
    vocabulary = {"<pad>": 0, "<s>": 1} | {word: number for number, word in enumerate(WORDS, start=2)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<s>")


def sentence(start: int, length: int = SEQUENCE - 4) -> str:
    return " ".join(WORDS[(start + 2 * number) % len(WORDS)] for number in range(length))


def texts(count: int = 16) -> datasets.Dataset:
    return datasets.Dataset.from_list([{"text": sentence(3 * number)} for number in range(count)])


def preferences(count: int = 16) -> datasets.Dataset:
    rows = [
        {
            "prompt": sentence(number, 3),
            "chosen": " " + sentence(number + 6, 4),
            "rejected": " " + sentence(50 - number, 4),
        }
        for number in range(count)
    ]
    return datasets.Dataset.from_list(rows)


SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 6,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "seed": 3,
    "learning_rate": 3e-3,
    "max_length": SEQUENCE,
    "dataloader_pin_memory": False,
}
