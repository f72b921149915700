"""Rows of each format to what they mean, and what is said of rows that mean nothing."""

from __future__ import annotations

from typing import Any

import pytest

from stronghold.lab.finetuning.examples import Chat, Pair, Text, example_of
from stronghold.lab.finetuning.rows import Row

USER, ANSWER = {"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}
SYSTEM = {"role": "system", "content": "be kind"}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"messages": [SYSTEM, USER, ANSWER]}, Chat([SYSTEM, USER, ANSWER])),
        ({"messages": [USER, {**ANSWER, "tool_calls": None}], "text": "w9"}, Chat([USER, ANSWER])),
        ({"messages": [USER, ANSWER], "tools": TOOLS}, Chat([USER, ANSWER], TOOLS)),
        ({"messages": [USER, ANSWER], "tools": '[{"type": "function", "function": {"name": "add"}}]'},
         Chat([USER, ANSWER], TOOLS)),
        ({"conversations": [{"from": "system", "value": "be kind"}, {"from": "human", "value": "w1"},
                            {"from": "gpt", "value": "w2"}]}, Chat([SYSTEM, USER, ANSWER])),
        ({"conversation": [USER, ANSWER]}, Chat([USER, ANSWER])),
        ({"instruction": "w1", "output": "w2"}, Chat([USER, ANSWER])),
        ({"instruction": "w1", "input": "", "output": "w2", "text": "w9"}, Chat([USER, ANSWER])),
        ({"instruction": "w1", "input": "w3", "output": "w2", "system": "be kind"},
         Chat([SYSTEM, {"role": "user", "content": "w1\n\nw3"}, ANSWER])),
        ({"prompt": "w1", "completion": "w2"}, Pair("w1", "w2")),
        ({"prompt": "w1", "completion": "w2", "chosen": "w3"}, Pair("w1", "w2")),
        ({"prompt": "", "completion": "w2"}, Pair("", "w2")),
        ({"prompt": [USER], "completion": [ANSWER]}, Pair([USER], [ANSWER])),
        ({"text": "w1", "id": 3}, Text("w1")),
    ],
)  # fmt: skip
def test_a_row_of_each_format(fields: dict[str, Any], expected: Any) -> None:
    assert example_of(Row("d.jsonl:7", fields)) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "w1"}, 'no "completion"'),
        ({"completion": "w1"}, 'no "prompt"'),
        ({"prompt": "w1", "completion": " "}, '"completion" has none, or it is empty'),
        ({"prompt": [USER], "completion": [{"role": "assistant", "content": ""}]}, '"completion" has none'),
        ({"prompt": [USER], "completion": "w2"}, "a list and a str"),
        ({"prompt": 3, "completion": "w2"}, '"prompt" must be text .*: it is 3'),
        ({"instruction": "w1"}, 'no "output"'),
        ({"instruction": "w1", "output": ""}, '"output" has none'),
        ({"messages": [USER]}, '"messages" has none'),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, '"messages" has none'),
        ({"messages": []}, r'"messages" is \[\]'),
        ({"messages": "w1"}, "\"messages\" is 'w1'"),
        ({"messages": [USER, {"content": "w1"}]}, r'"messages", message 2 is \{'),
        ({"messages": [USER, {"role": "assistant"}]}, "message's content must be text .*message 2 has None"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}, "message 1 has .*images"),
        ({"conversations": [{"from": "human", "value": "w1"}]}, '"conversations" has none'),
        ({"conversations": [{"from": "human"}]}, '"conversations", message 1 is'),
        ({"messages": [USER, ANSWER], "tools": "{"}, '"tools" must be a list'),
        ({"messages": [USER, ANSWER], "tools": "{}"}, r'"tools" must be a list.* it is \{\}'),
        ({"text": ""}, '"text" has none'),
        ({"prompt ": "w1", "answer": "w2"}, "its fields are 'prompt ', 'answer'"),
        ({}, "its fields are none"),
        ({"chosen": "w1", "rejected": "w2"}, "a pair to choose from.*examples/dpo.py"),
        ({"prompt": "w0", "chosen": "w1", "rejected": "w2"}, "a pair to choose from.*examples/dpo.py"),
        ({"instruction": "w0", "chosen": "w1", "rejected": "w2"}, "a pair to choose from.*examples/dpo.py"),
        ({"prompt": "w1 \ud800", "completion": "w2"}, r""""prompt" has '\\ud800', one half.*its character 4"""),
        ({"prompt": "w1", "completion": "\udc00"}, r""""completion" has '\\udc00', one half"""),
        ({"text": "w1\ud800\ud800"}, r""""text" has '\\ud800', one half.*its character 3"""),
        ({"messages": [USER, {"role": "assistant", "content": "\ud800"}]}, r""""messages", message 2 has '\\ud800'"""),
    ],
)
def test_a_row_that_cannot_be_learned_is_told_with_its_place(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as told:
        example_of(Row("d.jsonl:7", fields))
    assert "at d.jsonl:7: " in str(told.value)
