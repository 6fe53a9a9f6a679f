"""Rows that are plain, and rows that are not: the tables of the tests of plain rows, and what these share."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from itertools import count, islice
from types import SimpleNamespace
from typing import Any, Final

from msgspec import UNSET

from penstock.chat.conversation import Message
from penstock.chat.formats import ROLES, SHAREGPT_ROLES, WEIGHT_KEYS, Format, Mapping
from penstock.chat.locality import Locality
from penstock.chat.plain_rows import Flat, Odd, Plain, PlainRows, Weights, as_message
from penstock.chat.rows import Normaliser
from penstock.chat.special_text import SpecialTextFinder
from tests.chat.splitting import assistant, calls, returns, user

OTHERS: Final = (("system", "system"), ("tools", "tools"), ("variables", "chat_template_kwargs"))
MESSAGES: Final = Mapping(
    Format.MESSAGES,
    (("messages", "messages"), *OTHERS),
    "role",
    "content",
    tuple(sorted(ROLES.items())),
    WEIGHT_KEYS,
)
SHAREGPT: Final = Mapping(
    Format.SHAREGPT,
    (("messages", "conversations"), *OTHERS),
    "from",
    "value",
    tuple(sorted(SHAREGPT_ROLES.items())),
    WEIGHT_KEYS,
)
READS_CALLS: Final = Locality(frozenset(), True, True)
READS_NONE: Final = Locality(frozenset(("tool_calls",)), False, False)
READS_NAMES: Final = Locality(frozenset(("name",)), True, True)
TURNS: Final = [user("q"), assistant("a")]
TEXT: Final = b'{"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "a"}]}'


def decode(plain: PlainRows, rows: Sequence[bytes], others: Container[int] = ()) -> dict[int, Plain]:
    """The rows that are decoded, by number."""
    return weighed(plain, rows, others)[0]


def weighed(
    plain: PlainRows, rows: Sequence[bytes], others: Container[int] = ()
) -> tuple[dict[int, Plain], dict[int, Weights]]:
    """The same, and the weights of rows that give some."""
    taken = Taken()
    weights = plain.read(list(rows), SpecialTextFinder(()).find(list(rows))[1], others, taken)
    return dict(sorted(taken.rows.items())), weights


class Taken:
    """What was decoded, by row, whichever way it came."""

    def __init__(self) -> None:
        self.rows: dict[int, Plain] = {}

    def add_plain(self, rows: Sequence[int], decoded: Sequence[Plain]) -> None:
        self.rows.update(zip(rows, decoded, strict=True))

    def add_flat(self, flat: Flat) -> None:
        said = iter(zip(count(), flat.roles, flat.words, strict=False))
        for row, size in zip(flat.rows, flat.counts, strict=True):
            messages = [
                flat.odd.get(place, Odd(flat.names[role], words and words.decode(), UNSET))
                for place, role, words in islice(said, size)
            ]
            if None not in messages:  # such a row is left to the reader
                self.rows[row] = SimpleNamespace(messages=messages, tools=None)


def shown(message: Message) -> Message:
    """What a template that reads neither ids nor names sees of a message."""
    seen = {key: value for key, value in message.items() if key not in ("name", "tool_call_id", "id")}
    if "tool_calls" in seen:
        seen["tool_calls"] = [{k: v for k, v in call.items() if k != "id"} for call in seen["tool_calls"]]
    return seen


def exactly(value: object) -> str:
    """A value with its types: 1 is not 1.0."""
    return json.dumps(value, sort_keys=True)


def check(rows: Sequence[bytes], mapping: Mapping = MESSAGES, locality: Locality = READS_CALLS) -> list[int]:
    """The numbers of the rows that are decoded, each as the reader reads it."""
    plain, reader = PlainRows(mapping, locality), Normaliser(mapping)
    found, weights = weighed(plain, rows)
    assert weights.keys() <= found.keys()
    for number, decoded in found.items():
        (conversation,) = reader.conversations(rows[number])
        assert exactly(conversation.tools) == exactly(decoded.tools) and conversation.variables is None
        assert exactly(conversation.weights) == exactly(weights.get(number))
        own = [as_message(message, plain.roles[message.role]) for message in decoded.messages]
        assert exactly(own) == exactly([shown(message) for message in conversation.messages])
    return list(found)


def row(messages: object, **more: Any) -> bytes:
    return json.dumps({"messages": messages, **more}, ensure_ascii=False).encode()


def called(arguments: object, **more: Any) -> bytes:
    """A row with one call; a function's further keys may be given."""
    function = {"name": "f", "arguments": arguments, **more}
    return row([user("q"), assistant("", tool_calls=[{"type": "function", "function": function}])])


def with_column(value: bytes) -> bytes:
    return row(TURNS)[:-1] + b', "x": ' + value + b"}"


# ---- tables

DECODED: Final[dict[str, bytes]] = {
    "two turns": row(TURNS),
    "spaces": b' \n{ "messages" : [ {"content":"q","role":"user"} , {"role":"assistant","content":"a"} ] }\t ',
    "every role": row([{"role": "system", "content": "s"}, *TURNS, returns("t")]),
    "unread keys": row([{**user("q"), "name": "n", "id": None}, assistant("a")]),
    "empty contents": row([user(""), assistant(" ")]),
    "calls": row([user("q"), calls("f", "g"), returns("t"), assistant("a")]),
    "calls and null": row([user("q"), calls("f", text=None), assistant("a")]),
    "argument strings": called('{"a": 1}'),
    "null of a tool": row([user("q"), assistant("a"), {"role": "tool", "content": None}]),
    "numbers": called({"a": 1, "b": 1.0, "c": -0.0, "d": 1e-7, "e": 2**63 - 1, "f": -(2**63), "g": True, "h": None}),
    "new columns": row(TURNS, id=1, source={"deep": [1, None, {}]}, **{"ключ": "v", "": 0}),
    "escapes": TEXT % b"\\u00e9\\n\\t\\/\\\\\\ud83d\\ude00",
    "escapes in keys": b'{"mess\\u0061ges": [{"r\\u006fle": "user", "content": "q"}, '
    b'{"role": "assist\\u0061nt", "content": "a"}]}',
    "a weight": row([user("q"), {**assistant("a"), "weight": 1}]),
    "weights": row([{**user("q"), "train": False}, {**assistant("a"), "train": 0.25}, user("r"), assistant("b")]),
    "a mask": row([{**user("q"), "masked": True}, {**assistant("a"), "masked": 0}]),
    "null weights": row([{**user("q"), "train": None}, TURNS[1]]),
    "tools": row(TURNS, tools=[{"name": "f", "more": [1, 1.5, 10**20, None, {"é": "日本"}]}, {}]),
    "an empty list of tools": row(TURNS, tools=[]),
    "no tools": row(TURNS, tools=None),
    "tools, calls, weights and more": row([user("q"), {**calls("f"), "weight": 0}], tools=[{"a": 1}], more=1),
    "unicode": TEXT % "日本 \u2028 \U0010fe00 \ufeff".encode(),
}
LEFT: Final[dict[str, bytes]] = {
    "control characters": TEXT % b"\\u0007",
    "a null character": TEXT % b"\\u0000",
    "a separator": TEXT % b"\\u001c",
    "a raw control character": TEXT % b"\x07",
    "a raw newline": TEXT % b"\n",
    "a raw null": TEXT % b"\x00",
    "invalid UTF-8": TEXT % b"\xff",
    "an overlong form": TEXT % b"\xc0\xaf",
    "UTF-8 of a surrogate": TEXT % b"\xed\xa0\x80",
    "a cut character": TEXT % b"\xe6\x97",
    "beyond Unicode": TEXT % b"\xf4\x90\x80\x80",
    "a lone surrogate": TEXT % b"\\ud800",
    "a low surrogate": TEXT % b"\\udc00",
    "two high surrogates": TEXT % b"\\ud800\\ud800",
    "an unknown escape": TEXT % b"\\x41",
    "a short escape": TEXT % b"\\u00",
    "no text": b"",
    "blanks": b"  ",
    "not an object": b"[]",
    "a null": b"null",
    "cut": row(TURNS)[:-1],
    "trailing bytes": row(TURNS) + b"x",
    "two rows": row(TURNS) * 2,
    "a trailing comma": row(TURNS)[:-1] + b",}",
    "single quotes": row(TURNS).replace(b'"', b"'"),
    "a null byte after it": row(TURNS) + b"\x00",
    "invalid UTF-8 in a column's name": row(TURNS)[:-1] + b', "\xff": 1}',
    "invalid UTF-8 in an unread key": TEXT.replace(b'"role": "user"', b'"role": "user", "name": "\xff"') % b"q",
    "tools as text": row(TURNS, tools='[{"name": "f"}]'),
    "tools that are text": row(TURNS, tools=['{"name": "f"}']),
    "tools that are no objects": row(TURNS, tools=[1]),
    "tools that are no list": row(TURNS, tools={"name": "f"}),
    "control characters in tools": row(TURNS, tools=[{"name": "\x07"}]),
    "a quote in a column's name": row(TURNS, **{'a"b': 1}),
    "a backslash in a column's name": row(TURNS, **{"a\\b": 1}),
    "a control character in a column's name": row(TURNS, **{"a\tb": 1}),
    "a system prompt": row(TURNS, system="s"),
    "variables": row(TURNS, chat_template_kwargs={}),
    "two weights": row([user("q"), {**assistant("a"), "weight": 1, "train": True}]),
    "a negative weight": row([user("q"), {**assistant("a"), "weight": -1}]),
    "a weight of words": row([user("q"), {**assistant("a"), "weight": "1"}]),
    "a mask that is a number": row([user("q"), {**assistant("a"), "masked": 1.0}]),
    "reasoning": row([user("q"), assistant("a", reasoning_content="r")]),
    "another key": row([{**user("q"), "x": 1}, TURNS[1]]),
    "an unread key of another type": row([{**user("q"), "name": 5}, TURNS[1]]),
    "no assistant": row([user("q")]),
    "no messages": row([]),
    "null messages": row(None),
    "no column": b"{}",
    "one message by itself": row(assistant("a")),
    "a string": row("q"),
    "a message that is none": row([*TURNS, "x"]),
    "no content": row([user("q"), {"role": "assistant"}]),
    "a number": row([{"role": "user", "content": 1}, TURNS[1]]),
    "parts": row([{"role": "user", "content": [{"type": "text", "text": "q"}]}, TURNS[1]]),
    "a role that is none": row([{"role": "bot", "content": "q"}, TURNS[1]]),
    "no role": row([{"content": "q"}, TURNS[1]]),
    "developer": row([{"role": "developer", "content": "d"}, *TURNS]),
    "a null role": row([{"role": None, "content": ""}, *TURNS]),
    "empty calls": row([user("q"), assistant("a", tool_calls=[])]),
    "null calls": row([user("q"), assistant("a", tool_calls=None)]),
    "bare calls": row([user("q"), assistant("", tool_calls=[{"name": "f", "arguments": {}}])]),
    "untyped calls": row([user("q"), assistant("", tool_calls=[{"function": {"name": "f", "arguments": {}}}])]),
    "arguments that are a list": called([]),
    "arguments that are null": called(None),
    "a number as arguments": called(1),
    "no name": row([user("q"), assistant("", tool_calls=[{"type": "function", "function": {"arguments": {}}}])]),
    "an empty name": called({}, name=""),
    "more of a function": called({}, more=1),
    "NaN in arguments": called({"a": float("nan")}),
}
HOSTILE: Final[dict[str, bytes]] = {
    "twice the messages": row(TURNS)[:-1] + b', "messages": []}',
    "messages twice": b'{"messages": 5, ' + row(TURNS)[1:],
    "a role twice": TEXT.replace(b'"role": "user"', b'"role": "assistant", "role": "user"') % b"q",
    "a bad role first": TEXT.replace(b'"role": "user"', b'"role": "bot", "role": "user"') % b"q",
    "a content twice": TEXT.replace(b'"role": "user"', b'"content": 5, "role": "user"') % b"q",
    "a column twice": row(TURNS, x=1)[:-1] + b', "x": 2}',
    "arguments twice": called({"a": 1}).replace(b'"a": 1', b'"a": 1, "a": 2.0'),
    "a name twice": called({}).replace(b'"name": "f"', b'"name": "f", "name": "g"'),
    "a byte order mark": b"\xef\xbb\xbf" + row(TURNS),
    "1e999": row(TURNS)[:-1] + b', "x": 1e999}',
    "-1e999": called({"a": 1}).replace(b'"a": 1', b'"a": -1e999'),
    "1e999 in arguments": called({"a": 1}).replace(b'"a": 1', b'"a": 1e999'),
    "1e400 in a list": called({"a": 1}).replace(b'"a": 1', b'"a": [{"b": 1e400}]'),
    "a tiny number": called({"a": 1}).replace(b'"a": 1', b'"a": 1e-999'),
    "a large integer": called({"a": 2**64, "b": -(2**64), "c": 2**70, "d": 10**300}),
    "a large float": called({"a": 1}).replace(b'"a": 1', b'"a": 1e20, "b": 18446744073709551616.0'),
    "many digits": called({"a": 1}).replace(b'"a": 1', b'"a": 0.1000000000000000055511151231257827, "b": 1.50'),
    "minus nothing": called({"a": 1}).replace(b'"a": 1', b'"a": -0'),
    "control characters in arguments": called({"a\x01": "\x00\x1f\x7f"}),
    "control characters in a name": called({}, name="f\x01"),
    "a lone surrogate in arguments": called({"a": 1}).replace(b'"a": 1', b'"a": "\\ud800"'),
    "invalid UTF-8 in arguments": called({"a": 1}).replace(b'"a": 1', b'"a": "\xff"'),
    "invalid UTF-8 in a key of arguments": called({"a": 1}).replace(b'"a": 1', b'"\xff": 1'),
    "argument strings that are no JSON": called("{"),
    "deep arguments": called({"a": 1}).replace(b'"a": 1', b'"a": ' + b"[" * 900 + b"]" * 900),
    "a long row": row([user("q" * 200_000), assistant("é" * 100_000)]),
    "1000 messages": row(TURNS * 500),
    "calls of a user": row([{**calls("f"), "role": "user"}, TURNS[1]]),
    "an integer of 5000 digits": row(TURNS)[:-1] + b', "x": ' + b"9" * 5000 + b"}",
    "an integer of 5000 digits in arguments": called({"a": 1}).replace(b'"a": 1', b'"a": ' + b"9" * 5000),
}
# Values of a column that make a row invalid.
BROKEN: Final[dict[str, bytes]] = {
    "nothing": b"",
    "NaN": b"NaN",
    "Infinity": b"-Infinity",
    "01": b"01",
    "+1": b"+1",
    "no digits": b"1.",
    "1e999": b"1e999",
    "invalid UTF-8": b'"\xff"',
    "an overlong form": b'{"\xc0\xaf": 1}',
    "UTF-8 of a surrogate": b'["\xed\xa0\x80"]',
    "a lone surrogate": b'"\\ud800"',
    "a raw control character": b'"\x01"',
    "deep nesting": b"[" * 3000 + b"]" * 3000,
}
