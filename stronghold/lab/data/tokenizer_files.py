"""Which files of a model's folder are its tokenizer, and what they hold."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOKENIZER_FILES = (
    *("tokenizer*.json", "tokenizer*.model*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab*.json", "vocab.txt", "vocab.bpe", "merges.txt", "*.tiktoken", "tekken.json"),
    *("spiece.model", "spm*.model", "sentencepiece*.model", "source.spm", "target.spm"),
    *("chat_template*", "additional_chat_templates"),
)
"""Patterns of the names that transformers gives a tokenizer's files."""


def has_tokenizer(folder: Path) -> bool:
    """Whether ``folder`` holds a file that is a tokenizer's."""
    return folder.is_dir() and any(is_tokenizer_file(path) for path in folder.iterdir())


def is_tokenizer_file(path: Path) -> bool:
    """Whether ``path`` has the name of a tokenizer's file."""
    return any(path.match(pattern) for pattern in TOKENIZER_FILES)


def saved_files(tokenizer: Any) -> dict[str, bytes]:
    """Returns the files that transformers saves ``tokenizer``, one of its own, as, by their paths in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Writes what :func:`saved_files` returned into ``folder``."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
