"""Documents to one compact array of tokens."""

import json
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from stronghold.lab.data.tokenizer_files import saved_files

BYTES = 256
"""How many ids the byte tokenizer has, the separator not counted."""

BYTES_NAME = "bytes"
"""What names the byte tokenizer where a path would name another."""

# The end of a document, under the names that well-known tokenizers give it.
_SEPARATOR_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")


class Tokenizer(Protocol):
    """What turns text into ids; ``ids`` is one more than its largest, the separator's included.

    ``fingerprint`` is the same for the same vocabulary and separator, wherever it was loaded from. ``files`` are what
    goes beside a model that was trained on its ids.
    """

    name: str
    separator: int
    ids: int
    fingerprint: str
    files: Mapping[str, bytes]

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of ``text``, without any that mark begin or end."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and a separator of the caller's choice."""

    name = BYTES_NAME
    files: Mapping[str, bytes] = {}

    def __init__(self, separator: int = BYTES) -> None:
        if separator < BYTES:
            raise ValueError(f"a byte tokenizer's separator must not be a byte (got {separator}); pass {BYTES} or more")
        self.separator = separator
        self.ids = separator + 1
        self.fingerprint = f"bytes and {separator}"

    def encode(self, text: str) -> np.ndarray:
        # A lone surrogate, which JSON can express, has no UTF-8 of its own.
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)


class FileTokenizer:
    """A tokenizer of the transformers library, ``loaded`` from local files."""

    def __init__(self, name: str, loaded: Any, separator: int) -> None:
        vocabulary: dict[str, int] = loaded.get_vocab()
        listed = json.dumps(sorted(vocabulary.items()), ensure_ascii=False)
        self.name = name
        self.separator = separator
        self.ids = max([*vocabulary.values(), separator]) + 1
        self.fingerprint = f"{len(vocabulary)} tokens with CRC-32 {zlib.crc32(listed.encode()):08x} and {separator}"
        self.files: Mapping[str, bytes] = saved_files(loaded)
        self._loaded = loaded

    def encode(self, text: str) -> np.ndarray:
        # The library takes no lone surrogate, which JSON can express.
        whole = text.encode("utf-8", errors="replace").decode("utf-8")
        return np.asarray(self._loaded.encode(whole, add_special_tokens=False, verbose=False), dtype=np.int64)


def load_tokenizer(path: str | Path, *, separator: int | None = None) -> FileTokenizer:
    """Returns the tokenizer of a directory, as transformers' AutoTokenizer reads it, or of a ``tokenizer.json``.

    Its own end-of-text token separates documents; a tokenizer without one takes ``separator``. Raises
    ValueError where there is no tokenizer or nothing to separate with.
    """
    path = Path(path)
    if not (path.is_dir() or path.is_file()):
        raise ValueError(
            f"a tokenizer must be an existing directory or tokenizer.json (got {str(path)!r}); pass another path"
        )
    try:
        loaded = _from_directory(path) if path.is_dir() else _from_json(path)
        own = _separator_of(loaded)
        separator = separator if own is None else own
        if separator is not None:
            return FileTokenizer(str(path), loaded, separator)
    except Exception as error:  # the libraries raise bare Exceptions for files that they cannot read
        raise ValueError(
            "a tokenizer must be a tokenizer.json or a transformers tokenizer's directory "
            f"(got {str(path)!r}: {' '.join(str(error).split())[:200]}); save it again, or pass another"
        ) from error
    raise ValueError(
        f"a tokenizer must have an end-of-text token (got none in {str(path)!r}); set its eos_token and save it again"
    )


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
            ids = tokenizer.encode(document)
            empty = empty and not len(ids)
            content = np.concatenate((ids.astype(dtype), separator))
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
            raise ValueError(
                f"data must hold text (got only empty documents, or such that {tokenizer.name!r} makes no tokens of); "
                "pass files with text"
            )
        return np.memmap(file, dtype=dtype, mode="r")


def _from_directory(directory: Path) -> Any:
    from transformers import AutoTokenizer

    # Told not to trust code beside it, transformers does not ask whether to.
    return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)


def _from_json(file: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(file), **_named_separator(file.parent))


def _separator_of(loaded: Any) -> int | None:
    """Returns the id of a tokenizer's end of text, if it has one."""
    own: int | None = loaded.eos_token_id if loaded.eos_token_id is not None else loaded.sep_token_id
    if own is not None:
        return own
    vocabulary = loaded.get_vocab()
    return next((vocabulary[name] for name in _SEPARATOR_NAMES if name in vocabulary), None)


def _named_separator(directory: Path) -> dict[str, str]:
    """Returns the end-of-text token that transformers' files beside a tokenizer.json name, if they do."""
    for file in (directory / "tokenizer_config.json", directory / "special_tokens_map.json"):
        if file.is_file():
            token = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                return {"eos_token": token}
    return {}
