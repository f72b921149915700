"""Documents to tokens: bytes, and tokenizers from files."""

import numpy as np
import pytest

from stronghold.lab.data.tokenizer_files import has_tokenizer, write_files
from stronghold.lab.data.tokens import ByteTokenizer, check_vocabulary, load_tokenizer, tokenize


@pytest.fixture(scope="module")
def word_tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "red": 1, "green": 2, "blue": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


def test_bytes_are_their_own_ids_and_every_document_ends_with_the_separator():
    tokens = tokenize(["aé", "", "b"], ByteTokenizer(separator=51200))
    assert tokens.tolist() == [97, 0xC3, 0xA9, 51200, 51200, 98, 51200]
    assert tokens.dtype == np.uint16
    assert not tokens.flags.writeable


def test_ids_beyond_16_bits_take_32():
    tokens = tokenize(["a"], ByteTokenizer(separator=2**16))
    assert tokens.dtype == np.uint32
    assert tokens.tolist() == [97, 65536]
    assert tokenize(["a"], ByteTokenizer(separator=2**16 - 1)).dtype == np.uint16


def test_a_separator_among_the_bytes_is_refused():
    with pytest.raises(ValueError, match="got 255"):
        ByteTokenizer(separator=255)


def test_a_lone_surrogate_is_replaced():
    assert tokenize(["\ud800"], ByteTokenizer()).tolist() == [63, 256]


def test_no_text_at_all_is_refused():
    with pytest.raises(ValueError, match="only empty documents"):
        tokenize([], ByteTokenizer())


def test_a_disk_that_is_full_is_named(tmp_path, monkeypatch):
    class Full:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def write(self, content):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", lambda dir: Full())
    with pytest.raises(OSError, match=f"No space left on device.*{tmp_path}"):
        tokenize(["a"], ByteTokenizer(), directory=tmp_path)


def test_a_tokenizer_json_encodes_and_separates_with_its_end_of_text(tmp_path, word_tokenizer):
    word_tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="must have an end-of-text token"):
        load_tokenizer(tmp_path)
    bare = load_tokenizer(tmp_path, separator=7)
    assert (bare.separator, bare.ids) == (7, 8)
    assert tokenize(["red blue", "green pink"], bare).tolist() == [1, 3, 7, 2, 0, 7]

    with_end = type(word_tokenizer).from_file(str(tmp_path / "tokenizer.json"))
    with_end.add_special_tokens(["</s>", "<stop>"])
    with_end.enable_truncation(max_length=1)
    with_end.save(str(tmp_path / "tokenizer.json"))
    known = load_tokenizer(tmp_path / "tokenizer.json", separator=7)
    assert (known.separator, known.ids) == (4, 6)
    assert known.encode("red green blue").tolist() == [1, 2, 3]

    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"__type": "AddedToken", "content": "<stop>"}}')
    assert load_tokenizer(tmp_path).separator == 5
    assert load_tokenizer(tmp_path / "tokenizer.json").separator == 5


def test_a_transformers_directory_without_tokenizer_json_is_read_by_transformers(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}'
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.separator == 3
    assert tokenizer.encode("abba").tolist() == [2, 1, 0]


@pytest.mark.parametrize("content", ["{", '{"model": 3}'])
def test_a_broken_tokenizer_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"got '.*'.*save it again") as refusal:
        load_tokenizer(tmp_path)
    assert "\n" not in str(refusal.value)


def test_a_folder_is_read_as_autotokenizer_reads_it_which_may_differ_from_its_tokenizer_json(tmp_path, word_tokenizer):
    from transformers import AutoTokenizer, BertTokenizer

    words = ["[UNK]", "[SEP]", "[CLS]", "[PAD]", "[MASK]", "red", "blue"]
    BertTokenizer(vocab={word: place for place, word in enumerate(words)}).save_pretrained(tmp_path)
    raw = type(word_tokenizer).from_file(str(tmp_path / "tokenizer.json"))
    raw.normalizer = None  # as a file that was edited: the class makes its own
    raw.save(str(tmp_path / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("RED blue").tolist() == theirs.encode("RED blue", add_special_tokens=False)
    assert loaded.separator == 1


def test_the_files_of_a_tokenizer_make_it_again_and_its_fingerprint_is_of_what_it_does(tmp_path, word_tokenizer):
    from transformers import AutoTokenizer

    for name, more in (("one", []), ("two", []), ("other", ["pink"])):
        (tmp_path / name).mkdir()
        tokenizer = type(word_tokenizer).from_str(word_tokenizer.to_str())
        tokenizer.add_special_tokens(["</s>", *more])
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
    one, two, other = (load_tokenizer(tmp_path / name) for name in ("one", "two", "other"))
    assert one.fingerprint == two.fingerprint != other.fingerprint
    assert one.fingerprint != ByteTokenizer().fingerprint != ByteTokenizer(300).fingerprint
    write_files(other.files, tmp_path / "two")
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "two").encode("red pink")
        == [1, 5]
        == other.encode("red pink").tolist()
    )
    assert other.encode("\ud800 red").tolist() == [0, 1], "a lone surrogate is replaced"


def test_a_tokenizer_that_makes_nothing_of_the_text_is_refused():
    class Mute(ByteTokenizer):
        def encode(self, text):
            return np.zeros(0, dtype=np.uint8)

    with pytest.raises(ValueError, match="'bytes' makes no tokens of"):
        tokenize(["a", "b"], Mute())


def test_what_a_tokenizer_of_transformers_is_made_of_is_known_by_its_name(tmp_path):
    for name in ("tokenizer.json", "vocab.txt", "sentencepiece.bpe.model", "tokenizer.model.v3", "chat_template.jinja"):
        assert not has_tokenizer(tmp_path)
        (tmp_path / name).touch()
        assert has_tokenizer(tmp_path), name
        (tmp_path / name).unlink()
    for name in ("config.json", "model.safetensors", "notes.txt"):
        (tmp_path / name).touch()
    assert not has_tokenizer(tmp_path) and not has_tokenizer(tmp_path / "config.json")


def test_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be an existing directory"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(ValueError, match="save it again, or pass another"):
        load_tokenizer(tmp_path)


def test_ids_beyond_the_models_vocabulary_are_refused_with_both_numbers():
    check_vocabulary(ByteTokenizer(separator=300), 301)
    with pytest.raises(ValueError, match="ids up to 300 from 'bytes', the model takes 0 to 299"):
        check_vocabulary(ByteTokenizer(separator=300), 300)
