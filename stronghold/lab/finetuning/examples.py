"""What a row of data means: a conversation, a prompt with its completion, or a text.

The format is told by the fields of each row, in this order: ``messages``; ``conversations`` (ShareGPT); ``prompt`` and
``completion``; ``instruction`` and ``output`` (Alpaca); ``text``. Files may mix them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from stronghold.lab.finetuning.rows import Row

Message = dict[str, Any]
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
"""What ShareGPT calls a speaker, where that is not what chat templates call it."""
FORMATS = '"messages", "conversations", "prompt" and "completion", "instruction" and "output", or "text"'


@dataclass(frozen=True)
class Chat:
    """Messages with ``role`` and ``content``; those of the assistant are what is learned."""

    messages: list[Message]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Pair:
    """A prompt and the completion that is learned, both as text or both as messages."""

    prompt: str | list[Message]
    completion: str | list[Message]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Text:
    """A text that is learned as a whole."""

    text: str


Example = Chat | Pair | Text


def example_of(row: Row) -> Example:
    """Returns what ``row`` means. Raises ValueError, naming its place, for a row of no format, or without completion.

    Alpaca's ``instruction`` and, below it, ``input`` are what the user says, and ``output`` what the assistant answers,
    so that the model's own chat template applies.
    """
    fields = row.fields
    if "messages" in fields:
        return Chat(_conversation(fields["messages"], "messages", row.place), _tools(row))
    for name in ("conversations", "conversation"):
        if name in fields:
            return Chat(_conversation(_from_sharegpt(fields[name], name, row.place), name, row.place), _tools(row))
    if "chosen" in fields and not fields.keys() & {"completion", "output", "text"}:
        raise ValueError(
            f"a row to fine-tune on has one completion (at {row.place}: a pair to choose from); examples/dpo.py trains "
            "on such pairs"
        )
    if "prompt" in fields or "completion" in fields:
        return _pair(row)
    if "instruction" in fields:
        return _alpaca(row)
    if "text" in fields:
        return Text(_text(fields["text"], "text", row.place))
    names = ", ".join(map(repr, list(fields)[:8])) or "none"
    raise ValueError(f"a row must have {FORMATS} (at {row.place}: its fields are {names}); rename them, or remove it")


def _pair(row: Row) -> Pair:
    fields, place = row.fields, row.place
    for name in ("prompt", "completion"):
        if name not in fields:
            raise ValueError(
                f'a row must have a prompt and a completion (at {place}: no "{name}"); give it one, or remove the row'
            )
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        said = _messages(prompt, "prompt", place)
        answered = _messages(completion, "completion", place)
        if not any(_says_something(message) for message in answered):
            raise _without_completion(place, "completion")
        return Pair(said, answered, _tools(row))
    if isinstance(prompt, list) or isinstance(completion, list):
        raise ValueError(
            f"a prompt and its completion must both be text or both be messages (at {place}: a "
            f"{type(prompt).__name__} and a {type(completion).__name__}); write both in one way"
        )
    return Pair(_text(prompt, "prompt", place, empty=True), _text(completion, "completion", place))


def _alpaca(row: Row) -> Chat:
    fields, place = row.fields, row.place
    if "output" not in fields:
        raise ValueError(
            f'a row with an instruction must have a completion (at {place}: no "output"); give it one, or remove the '
            "row"
        )
    asked = _text(fields["instruction"], "instruction", place)
    given = _text(fields.get("input", ""), "input", place, empty=True)
    system = [{"role": "system", "content": _text(fields["system"], "system", place)}] if fields.get("system") else []
    user = {"role": "user", "content": f"{asked}\n\n{given}" if given else asked}
    return Chat([*system, user, {"role": "assistant", "content": _text(fields["output"], "output", place)}])


def _from_sharegpt(turns: Any, name: str, place: str) -> Any:
    """Returns ShareGPT's ``from`` and ``value`` as messages; what is none is left to be refused as such."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return turns
    return [
        {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}
        if isinstance(turn.get("from"), str) and "value" in turn
        else turn
        for turn in turns
    ]


def _conversation(messages: Any, name: str, place: str) -> list[Message]:
    found = _messages(messages, name, place)
    if not any(message["role"] == "assistant" and _says_something(message) for message in found):
        raise _without_completion(place, name)
    return found


def _messages(messages: Any, name: str, place: str) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f'messages must be a list of at least one (at {place}: "{name}" is {_shown(messages)}); mend or remove the '
            "row"
        )
    return [_message(message, f'"{name}", message {number}', place) for number, message in enumerate(messages, start=1)]


def _message(message: Any, name: str, place: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(
            f"a message must have a role and a content (at {place}: {name} is {_shown(message)}); write it as "
            '{"role": "user", "content": …}'
        )
    found = {key: value for key, value in message.items() if value is not None}  # a table has each field in each row
    if not isinstance(found.get("content", None if "tool_calls" in found else 0), str | None):
        raise ValueError(
            f"a message's content must be text (at {place}: {name} has {_shown(message.get('content'))}); images and "
            "other parts cannot be trained on here"
        )
    _check_unicode(found.get("content", ""), name, place)
    return found


def _text(value: Any, name: str, place: str, *, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise ValueError(f'"{name}" must be text (at {place}: it is {_shown(value)}); mend or remove the row')
    if not value.strip() and not empty:
        raise _without_completion(place, name)
    _check_unicode(value, f'"{name}"', place)
    return value


def _check_unicode(text: str, name: str, place: str) -> None:
    """Raises ValueError for what no tokenizer takes, and JSON can write: one half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text must be Unicode (at {place}: {name} has {text[error.start]!r}, one half of a surrogate pair, as its "
            f"character {error.start + 1}); mend or remove the row"
        ) from error


def _says_something(message: Message) -> bool:
    return bool(str(message.get("content", "")).strip() or message.get("tool_calls"))


def _without_completion(place: str, name: str) -> ValueError:
    return ValueError(
        f'a row must have something to learn (at {place}: "{name}" has none, or it is empty); give it a completion, or '
        "remove the row"
    )


def _tools(row: Row) -> list[Any] | None:
    tools = row.fields.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f'"tools" must be a list, or JSON of one (at {row.place}: {error}); mend it') from error
    if not isinstance(tools, list | None):
        raise ValueError(f'"tools" must be a list, or JSON of one (at {row.place}: it is {_shown(tools)}); mend it')
    return tools


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}, {text[:40]}…"
