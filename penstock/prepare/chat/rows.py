"""Reads rows, the bytes of JSON objects, as normalised conversations.

A row has one conversation; a preference row has two (chosen, rejected). A row is either read completely or refused with
a RowError whose `kind` is stable; nothing is guessed and nothing is dropped. A plain row of four messages costs about
2 µs besides parsing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from itertools import takewhile
from typing import Any

from penstock.errors import RowError, SourceError
from penstock.prepare.chat.conversation import Conversation, Message, Role
from penstock.prepare.chat.formats import LABEL_COLUMN, ColumnMapping, Format, detect, label_of
from penstock.prepare.chat.json_rows import LargeInteger, check_integers, describe_type, parse_row, parse_row_exactly
from penstock.prepare.chat.messages import Chat, ChatColumns, MessageReader, NormalizedMessages
from penstock.prepare.chat.notes import Note

Record = dict[str, Any]
_NOTHING: tuple[object, ...] = (None, "", [], {})
_PAIRS = 'Earlier turns are pairs such as [["question", "answer"], …]'


class RowReader:
    """Reads rows according to a mapping."""

    def __init__(self, mapping: ColumnMapping, *, exact: bool = False) -> None:
        self._mapping = mapping
        self._exact = exact  # whether rows are parsed with exact integers
        self._columns = dict(mapping.columns)
        self._reader = MessageReader(mapping)
        self._chat = ChatColumns(mapping)
        self._near = frozenset(mapping.near_columns)
        self._reads_answers = mapping.format not in (Format.KTO, Format.TEXT)  # beside text, 0 is a class
        self._read = self._reader_of(mapping.format)

    def conversations(self, row: bytes) -> tuple[Conversation, ...]:
        """Returns the conversation of a row, or both of a preference row. Raises RowError."""
        record = parse_row(row)
        try:
            found = self._read(record)
        except LargeInteger:
            found = RowReader(self._mapping, exact=True)._read(parse_row_exactly(row))
        unused = not self._near.isdisjoint(record) and any(record.get(name) not in _NOTHING for name in self._near)
        is_false = self._reads_answers and LABEL_COLUMN in record and label_of(record[LABEL_COLUMN]) is False
        notes = (Note.LABEL_FALSE,) * is_false + (Note.COLUMN_UNUSED,) * unused  # on what isn't used
        return tuple(conversation._replace(notes=notes) for conversation in found) if notes else found

    def _reader_of(self, name: Format) -> Callable[[Record], tuple[Conversation, ...]]:
        match name:
            case Format.MESSAGES | Format.SHAREGPT:
                return self._read_messages
            case Format.ALPACA | Format.QUERY_RESPONSE:
                return self._read_answer
            case Format.PROMPT_COMPLETION:
                return self._read_completion
            case Format.PREFERENCE:
                return self._read_preference
            case Format.KTO:
                return self._read_labelled
            case Format.TEXT:
                return self._read_text

    def _read_messages(self, record: Record) -> tuple[Conversation, ...]:
        turns = self._reader.read(self._value(record, "messages"), self._columns["messages"])
        return (self._conversation(turns, self._chat.read(record)),)

    def _read_answer(self, record: Record) -> tuple[Conversation, ...]:
        messages = self._question(record)
        messages.append({"role": "assistant", "content": self._text(record, "response")})
        return (self._conversation(NormalizedMessages(messages), self._chat.read(record)),)

    def _read_completion(self, record: Record) -> tuple[Conversation, ...]:
        prompt, completion = self._value(record, "prompt"), self._value(record, "completion")
        if type(prompt) is str and type(completion) is str:
            self._refuse_chat(record)
            return (self._plain(prompt, completion, "completion"),)
        if type(prompt) is str:
            raise self._mixed("prompt", "completion")
        turns = self._reader.read(prompt, self._columns["prompt"]).then(self._side(completion, "completion"))
        return (self._conversation(turns, self._chat.read(record)),)

    def _read_preference(self, record: Record) -> tuple[Conversation, ...]:
        chosen, rejected = self._value(record, "chosen"), self._value(record, "rejected")
        if (type(chosen) is str) != (type(rejected) is str):
            raise self._mixed("chosen", "rejected")
        prompt = record.get(self._columns["prompt"]) if "prompt" in self._columns else None
        if type(chosen) is str and "query" not in self._columns and (prompt is None or type(prompt) is str):
            self._refuse_chat(record)
            if prompt is None:
                prompt = _shared_text(chosen, rejected)
                chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
            return self._plain(prompt, chosen, "chosen"), self._plain(prompt, rejected, "rejected")
        sides = _whole_sides(
            self._prompt(record, prompt),
            self._side(chosen, "chosen"),
            self._side(rejected, "rejected"),
            (self._columns["chosen"], self._columns["rejected"]),
        )
        chat = self._chat.read(record)
        return tuple(self._conversation(side, chat) for side in sides)

    def _read_labelled(self, record: Record) -> tuple[Conversation, ...]:
        label = label_of(value := self._value(record, "label"))
        if label is None:
            raise RowError(
                "bad_label",
                f"column {self._columns['label']!r} is {value!r:.40}; expected true or false",
                "Remove the row, or leave labels out of account with --format messages or prompt_completion",
            )
        read = self._read_messages if "messages" in self._columns else self._read_completion
        return tuple(conversation._replace(label=label) for conversation in read(record))

    def _read_text(self, record: Record) -> tuple[Conversation, ...]:
        text = self._text(record, "text")
        if not text:
            raise RowError("empty_text", f"column {self._columns['text']!r} is an empty string", "Remove the row")
        return (Conversation([], texts=((Role.ASSISTANT, text),)),)

    def _value(self, record: Record, purpose: str) -> Any:
        column = self._columns[purpose]
        value = record.get(column)
        if value is not None:
            return value
        reason = f"there is no column {column!r}; the row's columns are {', '.join(record) or '(none)'}"
        remedy = f"Name the column with --{purpose}-key"
        if column in record:
            reason, remedy = f"column {column!r} is null", "Remove the row or give it a value"
        with suppress(SourceError):
            own, kinds = detect([record]).format, (Format.PREFERENCE, Format.KTO)
            can_mix = own == self._mapping.format or not {own, self._mapping.format} & {*kinds}
            reason = f"{reason} (format {own}), unlike those of the first rows (format {self._mapping.format})"
            remedy = f"Prepare rows of different formats apart{' and mix the datasets (ps.mix)' if can_mix else ''}"
        raise RowError("missing_column", reason, remedy)

    def _text(self, record: Record, purpose: str) -> str:
        value = self._value(record, purpose)
        if type(value) is not str:
            raise RowError(
                "bad_content", f"column {self._columns[purpose]!r} is {describe_type(value)}; expected a string"
            )
        return value

    def _side(self, value: object, purpose: str) -> NormalizedMessages:
        """Reads an answer: a string, a message or a list of messages."""
        if type(value) is str:
            return NormalizedMessages([{"role": "assistant", "content": value}])
        return self._reader.read(value, self._columns[purpose])

    def _prompt(self, record: Record, prompt: object) -> NormalizedMessages | None:
        if "query" in self._columns:
            return NormalizedMessages(self._question(record))
        if type(prompt) is str:
            return NormalizedMessages([{"role": "user", "content": prompt}])
        return None if prompt is None else self._reader.read(prompt, self._columns["prompt"])

    def _question(self, record: Record) -> list[Message]:
        """Returns earlier pairs and the question itself as messages."""
        messages: list[Message] = []
        column = self._columns["history"]
        history = record.get(column) or []
        if type(history) is not list:
            raise RowError("bad_history", f"column {column!r} is {describe_type(history)}, not a list", _PAIRS)
        for number, pair in enumerate(history):
            if type(pair) is not list or len(pair) != 2 or not all(type(text) is str for text in pair):
                raise RowError("bad_history", f"{column}[{number}] is not a pair of strings", _PAIRS)
            messages.append({"role": "user", "content": pair[0]})
            messages.append({"role": "assistant", "content": pair[1]})
        query = self._text(record, "query")
        has_input = "input" in self._columns and record.get(self._columns["input"])
        below = self._text(record, "input") if has_input else ""
        messages.append({"role": "user", "content": f"{query}\n\n{below}" if query and below else query or below})
        return messages

    def _plain(self, prompt: str, answer: str, purpose: str) -> Conversation:
        """Returns a conversation of plain texts, which no template renders. An empty prompt is omitted."""
        if not answer:
            raise RowError("empty_text", f"column {self._columns[purpose]!r} is an empty string", "Remove the row")
        texts = ((Role.USER, prompt), (Role.ASSISTANT, answer)) if prompt else ((Role.ASSISTANT, answer),)
        return Conversation([], texts=texts)

    def _refuse_chat(self, record: Record) -> None:
        """Refuses a system prompt or tools beside plain strings: no template renders these rows, so they'd be lost."""
        for name, value in zip(("tools", "system", "variables"), self._chat.read(record), strict=True):
            if value:
                raise RowError(
                    "bad_content",
                    f"column {self._columns[name]!r} has a value, but strings are not rendered by a template",
                    "Give the row's texts as lists of messages, or remove the column",
                )

    def _mixed(self, first: str, second: str) -> RowError:
        first, second = self._columns[first], self._columns[second]
        return RowError(
            "bad_content",
            f"one of {first!r} and {second!r} is a string and the other is not",
            "Give both as strings or both as lists of messages",
        )

    def _conversation(self, turns: NormalizedMessages, chat: Chat) -> Conversation:
        tools, system, variables = chat
        if system is not None:
            turns = self._chat.with_system(turns, system)
        messages, weights, loose, spans = turns
        for message in messages:
            if message["role"] == "assistant":
                break
        else:
            raise RowError(
                "no_assistant",
                "no message has the role assistant, so nothing can be trained",
                "Remove the row, or map the role that answers (--role NAME=assistant)",
            )
        if not self._exact:
            check_integers([*loose, tools, variables])
        if spans is None:
            return Conversation(messages, tools, weights, variables)
        places = tuple(own and own.places for own in spans)
        span_weights = tuple(own and own.weights for own in spans)
        return Conversation(messages, tools, weights, variables, spans=places, span_weights=span_weights)


# -- preference rows ----------------------------------------------------------------------------------------------


def _whole_sides(
    prompt: NormalizedMessages | None, chosen: NormalizedMessages, rejected: NormalizedMessages, names: tuple[str, str]
) -> tuple[NormalizedMessages, NormalizedMessages]:
    """Returns both sides as whole conversations with a common beginning, each ending in an assistant message.

    A side may be the answer alone or the whole conversation; without a prompt column, the prompt is what both share.
    """
    for side, name in ((chosen, names[0]), (rejected, names[1])):
        role = side.messages[-1]["role"]
        if role != "assistant":
            raise RowError("no_assistant", f"{name} ends in a message of role {role}; expected assistant")
    if prompt is None:
        if not _shared(chosen.messages, rejected.messages):
            raise RowError(
                "prompt_mismatch",
                f"{names[0]} and {names[1]} have no message in common and the row has no prompt",
                "Name the prompt's column with --prompt-key, or start both with the same messages",
            )
        return chosen, rejected
    if _starts_with(chosen.messages, prompt.messages) and _starts_with(rejected.messages, prompt.messages):
        for side, name in ((chosen, names[0]), (rejected, names[1])):
            _check_repeated_spans(side, prompt, name)
        return chosen, rejected
    for side, name in ((chosen, names[0]), (rejected, names[1])):
        role = side.messages[0]["role"]
        if role in ("system", "user"):
            raise RowError(
                "prompt_mismatch",
                f"{name} starts with a message of role {role} that is not the row's prompt",
                "Give only the answer there, or repeat the prompt exactly in both",
            )
    return prompt.then(chosen), prompt.then(rejected)


def _shared_text(chosen: str, rejected: str) -> str:
    """Returns the common prefix of two strings without its last word: an answer never starts inside a word."""
    most = min(len(chosen), len(rejected))
    length = bisect_left(range(most), True, key=lambda i: chosen[: i + 1] != rejected[: i + 1])
    word = len(list(takewhile(lambda character: not character.isspace(), reversed(chosen[:length]))))
    return chosen[: max(0, length - word - 1)]


def _starts_with(messages: list[Message], prompt: list[Message]) -> bool:
    """Whether a side repeats the prompt, possibly after a system prompt of its own."""
    skip = _skipped(messages, prompt)
    return len(messages) > len(prompt) + skip and messages[skip : skip + len(prompt)] == prompt


def _skipped(messages: list[Message], prompt: list[Message]) -> int:
    return int(messages[0]["role"] == "system" and prompt[0]["role"] != "system")


def _check_repeated_spans(side: NormalizedMessages, prompt: NormalizedMessages, name: str) -> None:
    """Refuses marked spans of a prompt that a side repeats without them, as the side's messages are used."""
    skip = _skipped(side.messages, prompt.messages)
    repeated = side.spans and side.spans[skip : skip + len(prompt.messages)]
    if prompt.spans is not None and prompt.spans != repeated:
        raise RowError(
            "bad_span",
            f"{name} repeats the prompt, but not its spans",
            "Give the same spans in both, or only the answer there",
        )


def _shared(chosen: list[Message], rejected: list[Message]) -> bool:
    return len(chosen) > 1 and len(rejected) > 1 and chosen[0] == rejected[0]
