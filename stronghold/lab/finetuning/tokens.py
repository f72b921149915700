"""Examples to token ids and labels, by the model's own tokenizer and chat template, as TRL's SFTTrainer makes them.

They are made here, and not by the trainer, so that what is wrong with a row is told with its file and line before
training starts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stronghold.lab.finetuning.examples import Chat, Example, Message, Pair, Text

IGNORED = -100
"""The label of a token that is not learned."""
LOSSES = ("completions", "all")


def load_chat_tokenizer(folder: str | Path) -> Any:
    """Returns the tokenizer of a model's folder. Raises ValueError, naming the folder, where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the libraries raise bare Exceptions for files that they cannot read
        raise ValueError(
            f"a model is fine-tuned with its own tokenizer (got none that can be read in {str(folder)!r}: "
            f"{' '.join(str(error).split())[:200]}); put its tokenizer.json and tokenizer_config.json there"
        ) from error


class Encoder:
    """Makes token ids and labels of examples; ``name`` says in errors where the tokenizer is from.

    With ``loss="completions"`` the labels of all but the completion are -100. Of messages it is what the assistant
    says: by the ``{% generation %}`` marks of the chat template, or by those that TRL knows of a well-known template;
    for any other template by what it writes with and without each answer. A text is learned as a whole, and so is
    everything with ``loss="all"``. ``ids`` is how many ids the model takes.
    """

    def __init__(self, tokenizer: Any, name: str, *, ids: int, loss: str = "completions") -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._ids = ids
        self._loss = loss
        self._template: str | None = None
        """What marks the assistant's tokens, where it is not the tokenizer's own template."""
        self._is_marked = False
        if tokenizer.chat_template is not None and loss == "completions":
            self._template, self._is_marked = _marked(tokenizer)

    def encode(self, example: Example, place: str) -> tuple[list[int], list[int]]:
        """Returns the ids of ``example`` and their labels, of one length.

        Raises ValueError, which names ``place``, where there is no chat template for messages, no end for a text, where
        the template refuses the messages or does not tell answers apart, and for ids that the model does not have.
        """
        if isinstance(example, Text):
            ids = self._plain(self._ended(example.text, place))
            labels = ids
        elif isinstance(example, Pair):
            ids, begin = self._pair(example, place)
            labels = [IGNORED] * begin + ids[begin:]
        else:
            ids, labels = self._chat(example, place)
        if ids and max(ids) >= self._ids:
            raise ValueError(
                f"a tokenizer's ids must lie within the model's vocabulary (at {place}: id {max(ids)} from "
                f"{self._name!r}, the model takes 0 to {self._ids - 1}); pass the model's own tokenizer"
            )
        labels = ids if self._loss == "all" else labels
        if not any(label != IGNORED for label in labels[1:]):  # the first token is never predicted
            raise ValueError(f"a row must have something to learn (at {place}: no token of it is); remove the row")
        return ids, labels

    def _pair(self, pair: Pair, place: str) -> tuple[list[int], int]:
        """Returns the ids of prompt and completion, and where the completion begins."""
        if isinstance(pair.prompt, str):
            assert isinstance(pair.completion, str)
            prompt = self._plain(pair.prompt)
            ids = self._plain(self._ended(pair.prompt + pair.completion, place))
        else:
            assert not isinstance(pair.completion, str)
            prompt = self._render(pair.prompt, place, tools=pair.tools, add_generation_prompt=True)
            ids = self._render(pair.prompt + pair.completion, place, tools=pair.tools)
        return ids, _alike(prompt, ids)

    def _chat(self, chat: Chat, place: str) -> tuple[list[int], list[int]]:
        if self._loss == "all":
            ids = self._render(chat.messages, place, tools=chat.tools)
            return ids, ids
        if not self._is_marked:
            return self._by_turns(chat, place)
        found = self._apply(chat.messages, place, tools=chat.tools, return_assistant_tokens_mask=True)
        ids, mask = found["input_ids"], found["assistant_masks"]
        return ids, [one if learned else IGNORED for one, learned in zip(ids, mask, strict=True)]

    def _by_turns(self, chat: Chat, place: str) -> tuple[list[int], list[int]]:
        """Finds each answer between what the template writes before it and what it writes with it."""
        messages, tools = chat.messages, chat.tools
        ids = self._render(messages, place, tools=tools)
        labels = [IGNORED] * len(ids)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], place, tools=tools, add_generation_prompt=True) if number else []
            through = self._render(messages[: number + 1], place, tools=tools)
            begin, end = _alike(before, ids), len(through)
            if ids[:end] != through or begin >= end:
                raise ValueError(
                    f"a chat template must tell which tokens are the assistant's (at {place}: that of {self._name!r} "
                    f"has no generation marks, and writes message {number + 1} otherwise once another follows); add "
                    "{% generation %} and {% endgeneration %} to it, learn from all tokens (--loss all), or write rows "
                    "of prompt and completion"
                )
            labels[begin:end] = ids[begin:end]
        return ids, labels

    def _render(self, messages: list[Message], place: str, **options: Any) -> list[int]:
        ids: list[int] = self._apply(messages, place, **options)["input_ids"]
        return ids

    def _apply(self, messages: list[Message], place: str, **options: Any) -> Any:
        if self._tokenizer.chat_template is None:
            raise ValueError(
                f"messages need the model's chat template (at {place}: the tokenizer of {self._name!r} has none); put "
                "its chat_template.jinja beside the tokenizer, or write rows of a text prompt and completion"
            )
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, chat_template=self._template, **options
            )
        except Exception as error:  # templates raise what their authors, jinja2 or Python's types raise
            raise ValueError(
                f"the model's chat template must take a row's messages (at {place}: {type(error).__name__}, "
                f"{' '.join(str(error).split())[:200]}); mend the messages, or the template of {self._name!r}"
            ) from error

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text=text, verbose=False)["input_ids"]
        return ids

    def _ended(self, text: str, place: str) -> str:
        end = self._tokenizer.eos_token
        if end is None:
            raise ValueError(
                f"a text ends with the tokenizer's end-of-sequence token (at {place}: that of {self._name!r} has "
                "none); set its eos_token and save it again"
            )
        return text if text.endswith(end) else text + end


def _marked(tokenizer: Any) -> tuple[str | None, bool]:
    """Returns TRL's template that marks the assistant's tokens, if one is needed, and whether there are marks."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if has_generation_markers(tokenizer.chat_template):
        return None, True
    try:
        return get_training_chat_template(tokenizer), True
    except ValueError:  # no template that TRL knows
        return None, False


def _alike(one: list[int], other: list[int]) -> int:
    """Returns with how many ids both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(one), len(other)))


Encode = Callable[[Example, str], tuple[list[int], list[int]]]
