"""Ids and labels of examples are those that TRL's SFTTrainer makes of the same rows, and by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import trl
from trl.chat_template_utils import qwen3_chat_template

from stronghold.lab.finetuning.examples import Chat, example_of
from stronghold.lab.finetuning.rows import Row
from stronghold.lab.finetuning.tokens import Encoder, load_chat_tokenizer
from tests.lab.finetuning import small

PAIRS = [{"prompt": f"{small.words(row, 3)} ", "completion": small.words(row, 1 + row % 3, 2)} for row in range(6)]
PAIRS_OF_MESSAGES = [
    {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in small.chats(6, turns=2)
]
TEXTS = [{"text": small.words(row, 4 + row)} for row in range(6)]


def encoded(rows: list[dict[str, Any]], tokenizer: Any, loss: str = "completions") -> list[tuple[list[int], list[int]]]:
    encoder = Encoder(tokenizer, "a model", ids=len(tokenizer), loss=loss)
    return [encoder.encode(example_of(Row(f"d:{number}", row)), f"d:{number}") for number, row in enumerate(rows)]


def of_trl(rows: list[dict[str, Any]], tokenizer: Any, folder: Path, **more: Any) -> list[tuple[list[int], list[int]]]:
    config = trl.SFTConfig(str(folder), report_to=[], use_cpu=True, bf16=False, max_length=64, **more)
    trainer = trl.SFTTrainer(
        model=small.model(), args=config, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    return [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]


def words_learned(pair: tuple[list[int], list[int]], tokenizer: Any) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens([label for label in pair[1] if label != -100]))


@pytest.mark.parametrize(
    ("rows", "template", "loss", "theirs"),
    [
        (PAIRS, None, "completions", {}),
        (PAIRS, None, "all", {"completion_only_loss": False}),
        (PAIRS_OF_MESSAGES, small.TEMPLATE, "completions", {}),
        (TEXTS, None, "completions", {}),
        (small.chats(6, turns=2), small.MARKED, "completions", {"assistant_only_loss": True}),
        (small.chats(6, turns=2), small.TEMPLATE, "all", {}),
        (small.chats(6, turns=2), qwen3_chat_template, "completions", {"assistant_only_loss": True}),
    ],
    ids=["pairs", "pairs, all", "pairs of messages", "texts", "marked", "messages, all", "a template that TRL knows"],
)
def test_they_are_what_trl_makes_of_the_same_rows(
    tmp_path: Path, rows: list[Any], template: str | None, loss: str, theirs: dict[str, Any]
) -> None:
    tokenizer = small.tokenizer(template)
    ours = encoded(rows, tokenizer, loss)
    assert ours == of_trl(rows, small.tokenizer(template), tmp_path, **theirs)
    partly = [any(label == -100 for label in labels) for _, labels in ours]
    assert all(partly) if loss == "completions" and rows is not TEXTS else not any(partly)


def test_of_one_answer_without_marks_the_labels_are_those_of_trls_pair(tmp_path: Path) -> None:
    rows = small.chats(6)
    pairs = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in rows]
    assert encoded(rows, small.tokenizer()) == of_trl(pairs, small.tokenizer(), tmp_path)


@pytest.mark.parametrize("template", [small.TEMPLATE, small.MARKED], ids=["without marks", "with marks"])
def test_only_what_the_assistant_says_is_learned_token_by_token(template: str) -> None:
    tokenizer = small.tokenizer(template)
    (row,) = small.chats(1, turns=2)
    ((ids, labels),) = encoded([row], tokenizer)
    first, second = (row["messages"][number]["content"] for number in (1, 3))
    assert words_learned((ids, labels), tokenizer) == f"{first} |> {second} |>"
    asked = tokenizer.convert_tokens_to_ids(f"<| user {row['messages'][0]['content']} |> <| assistant".split())
    assert ids[: len(asked)] == asked
    assert labels[: len(asked)] == [-100] * len(asked)
    assert all(label in (-100, one) for one, label in zip(ids, labels, strict=True))


def test_each_format_gives_the_tokens_of_the_messages_that_it_stands_for() -> None:
    tokenizer = small.tokenizer()
    said = [("system", "be kind"), ("user", "w1\n\nw2"), ("assistant", "w3 w4")]
    rows = [
        {"messages": [{"role": role, "content": content} for role, content in said]},
        {
            "conversations": [
                {"from": "system", "value": "be kind"},
                {"from": "human", "value": "w1\n\nw2"},
                {"from": "gpt", "value": "w3 w4"},
            ]
        },
        {"system": "be kind", "instruction": "w1", "input": "w2", "output": "w3 w4"},
    ]
    canonical, *others = encoded(rows, tokenizer)
    assert others == [canonical] * 2
    assert words_learned(canonical, tokenizer) == "w3 w4 |>"


def test_a_text_that_has_its_end_gets_no_second_one() -> None:
    tokenizer = small.tokenizer()
    with_end, without = encoded([{"text": "w1 w2<eos>"}, {"text": "w1 w2"}], tokenizer)
    assert with_end == without
    assert with_end[0][-1] == tokenizer.eos_token_id


def refused(rows: list[dict[str, Any]], tokenizer: Any, **more: Any) -> str:
    with pytest.raises(ValueError) as told:
        encoded(rows, tokenizer, **more)
    return str(told.value)


def test_messages_without_a_chat_template_are_refused_with_the_row() -> None:
    told = refused([{"text": "w1"}, *small.chats(1)], small.tokenizer(None))
    assert told.startswith("messages need the model's chat template (at d:1: the tokenizer of 'a model' has none)")
    assert "chat template" in refused([{"instruction": "w1", "output": "w2"}], small.tokenizer(None))
    assert "chat template" in refused(PAIRS_OF_MESSAGES[:1], small.tokenizer(None))


def test_a_template_that_refuses_the_messages_is_told_with_the_row() -> None:
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}" + small.TEMPLATE
    row = {"messages": [{"role": "assistant", "content": "w1"}]}
    assert "(at d:0: TemplateError, user first)" in refused([row], small.tokenizer(strict))


def test_a_template_that_rewrites_earlier_answers_is_refused_unless_all_is_learned() -> None:
    forgets = (
        "{% for message in messages %}<| {{ message['role'] }} "
        "{% if loop.last or message['role'] != 'assistant' %}{{ message['content'] }} {% endif %}|>{% endfor %}"
        "{% if add_generation_prompt %}<| assistant{% endif %}"
    )
    tokenizer, rows = small.tokenizer(forgets), small.chats(2, turns=2)
    assert "(at d:0: that of 'a model' has no generation marks, and writes message 2 otherwise" in refused(
        rows, tokenizer
    )
    assert len(encoded(rows, tokenizer, loss="all")) == 2
    assert len(encoded(small.chats(2), tokenizer)) == 2


def test_ids_beyond_the_models_are_refused_with_the_row() -> None:
    tokenizer = small.tokenizer()
    encoder = Encoder(tokenizer, "a model", ids=20)
    with pytest.raises(ValueError, match=r"at d:3: id 44 from 'a model', the model takes 0 to 19"):
        encoder.encode(example_of(Row("d:3", {"text": "w39"})), "d:3")


def test_a_text_needs_an_end_of_sequence_token() -> None:
    assert "(at d:0: that of 'a model' has none)" in refused([{"text": "w1"}], small.tokenizer(eos=None))


def test_a_row_of_which_no_token_is_learned_is_refused() -> None:
    marked_nothing = small.MARKED.replace("== 'assistant' %}{% gen", "== 'nobody' %}{% gen")
    assert "at d:0: no token of it is" in refused(small.chats(1), small.tokenizer(marked_nothing))


def test_the_tokenizer_of_a_folder(tmp_path: Path) -> None:
    small.tokenizer().save_pretrained(tmp_path)
    loaded = load_chat_tokenizer(tmp_path)
    assert loaded.get_vocab() == small.tokenizer().get_vocab()
    assert loaded.chat_template == small.TEMPLATE
    chat = Chat([{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}])
    assert Encoder(loaded, "m", ids=99).encode(chat, "d:0") == Encoder(small.tokenizer(), "m", ids=99).encode(chat, "d")
    (tmp_path / "void").mkdir()
    with pytest.raises(ValueError, match=r"with its own tokenizer \(got none that can be read in .*void"):
        load_chat_tokenizer(tmp_path / "void")
