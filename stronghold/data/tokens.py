"""Documents to one compact array of tokens."""

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

Encode = Callable[[str], list[int]]

BYTES = 256
"""How many ids the byte tokenizer has, the separator not counted."""

# The end of a document, under the names that well-known tokenizers give it.
_SEPARATOR_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")


class Tokenizer(Protocol):
    """What turns text into ids; ``ids`` is one more than its largest, the separator's included."""

    name: str
    separator: int
    ids: int

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of ``text``, without any that mark begin or end."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and a separator of the caller's choice."""

    name = "bytes"

    def __init__(self, separator: int = BYTES) -> None:
        if separator < BYTES:
            raise ValueError(f"a byte tokenizer's separator must not be a byte (got {separator}); pass {BYTES} or more")
        self.separator = separator
        self.ids = separator + 1

    def encode(self, text: str) -> np.ndarray:
        # A lone surrogate, which JSON can express, has no UTF-8 of its own.
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)


class FileTokenizer:
    """A tokenizer of the ``tokenizers`` or the transformers library, from local files only."""

    def __init__(self, name: str, encode: Encode, separator: int, ids: int) -> None:
        self.name = name
        self.separator = separator
        self.ids = ids
        self._encode = encode

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._encode(text), dtype=np.int64)


def load_tokenizer(path: str | Path, *, separator: int | None = None) -> FileTokenizer:
    """Returns the tokenizer of a directory or of a ``tokenizer.json``.

    Its own end-of-text token separates documents; a tokenizer without one takes ``separator``. Raises
    ValueError where there is no tokenizer or nothing to separate with.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        raise ValueError(
            f"a tokenizer must be an existing directory or tokenizer.json (got {str(path)!r}); pass another path"
        )
    try:
        encode, own, largest = _from_json(file) if file.is_file() else _from_transformers(path)
    except Exception as error:  # both libraries raise bare Exceptions for files that they cannot read
        raise ValueError(
            "a tokenizer must be a tokenizer.json or a transformers tokenizer's directory "
            f"(got {str(path)!r}: {' '.join(str(error).split())[:200]}); save it again, or pass another"
        ) from error
    if own is None:
        if separator is None:
            raise ValueError(
                f"a tokenizer must have an end-of-text token (got none in {str(path)!r}); "
                "set its eos_token and save it again"
            )
        own = separator
    return FileTokenizer(str(path), encode, own, max(largest, own) + 1)


def check_vocabulary(tokenizer: Tokenizer, ids: int) -> None:
    """Raises ValueError if ``tokenizer`` may give an id that a model with ``ids`` ids does not have."""
    if tokenizer.ids > ids:
        raise ValueError(
            f"a tokenizer's ids must lie within the model's vocabulary (got ids up to {tokenizer.ids - 1} "
            f"from {tokenizer.name!r}, the model takes 0 to {ids - 1}); pass the model's own tokenizer, or a "
            f"model with a vocabulary of at least {tokenizer.ids}"
        )


def tokenize(documents: Iterable[str], tokenizer: Tokenizer, *, directory: str | Path | None = None) -> np.ndarray:
    """Returns all documents' ids in one read-only array, each document followed by the separator.

    Its dtype is uint16 where every id fits, else uint32. It is mapped from an unnamed file in ``directory``
    (default: the system's for temporary files), so its size is not bounded by memory and it goes away by
    itself. Raises ValueError if there is no text at all.
    """
    dtype = np.dtype(np.uint16 if tokenizer.ids <= 2**16 else np.uint32)
    separator = np.array([tokenizer.separator], dtype=dtype)
    empty = True
    with tempfile.TemporaryFile(dir=directory) as file:
        for document in documents:
            empty = False
            content = np.concatenate((tokenizer.encode(document).astype(dtype), separator))
            try:
                file.write(content.data)
                file.flush()
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"cannot write the tokens ({error.strerror}); free space there, or set TMPDIR",
                    str(directory or tempfile.gettempdir()),
                ) from error
        if empty:
            raise ValueError("data must hold text (got only empty documents); pass files with text")
        return np.memmap(file, dtype=dtype, mode="r")


def _from_json(file: Path) -> tuple[Encode, int | None, int]:
    """Returns how to encode, the end-of-text token's id if there is one, and the largest id."""
    from tokenizers import Tokenizer as Fast

    fast = Fast.from_file(str(file))
    fast.no_truncation()  # what a file was saved with would cut documents short
    fast.no_padding()
    names = [*_named_separator(file.parent), *_SEPARATOR_NAMES]
    own = next((id_ for name in names if (id_ := fast.token_to_id(name)) is not None), None)
    largest = max(fast.get_vocab(with_added_tokens=True).values(), default=-1)
    return lambda text: fast.encode(text, add_special_tokens=False).ids, own, largest


def _from_transformers(directory: Path) -> tuple[Encode, int | None, int]:
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    own = slow.eos_token_id if slow.eos_token_id is not None else slow.sep_token_id
    largest = max(slow.get_vocab().values(), default=-1)
    return lambda text: slow.encode(text, add_special_tokens=False, verbose=False), own, largest


def _named_separator(directory: Path) -> list[str]:
    """Returns the end-of-text token that transformers' files beside a tokenizer.json name, if they do."""
    for file in (directory / "tokenizer_config.json", directory / "special_tokens_map.json"):
        if file.is_file():
            token = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                return [token]
    return []
