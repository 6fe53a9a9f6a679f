"""What is decoded as plain would have been read equally; whatever has more to it is left to the reader of rows."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from contextlib import suppress
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.chat.conversation import Message
from penstock.chat.formats import ROLES, SHAREGPT_ROLES, WEIGHT_KEYS, Format, Mapping
from penstock.chat.locality import Locality
from penstock.chat.plain_rows import Plain, PlainRows, as_message
from penstock.chat.rows import Normaliser
from penstock.chat.shapes import Draft, Shapes
from penstock.chat.special_text import SpecialTextFinder
from penstock.errors import RowError
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
READS_CALLS: Final = Locality(frozenset(), True)
READS_NONE: Final = Locality(frozenset(("tool_calls",)), False)
READS_NAMES: Final = Locality(frozenset(("name",)), True)
TURNS: Final = [user("q"), assistant("a")]
TEXT: Final = b'{"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "a"}]}'


def decode(plain: PlainRows, rows: Sequence[bytes], others: Container[int] = ()) -> dict[int, Plain]:
    """The rows that are decoded, by number."""
    found: dict[int, Plain] = {}

    def add(numbers: Sequence[int], lists: Sequence[Plain]) -> None:
        found.update(zip(numbers, lists, strict=True))

    plain.read(rows, SpecialTextFinder(()).find(rows)[1], others, add)
    return found


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
    found = decode(plain, rows)
    for number, messages in found.items():
        (conversation,) = reader.conversations(rows[number])
        assert conversation.tools is None and conversation.variables is None and conversation.weights is None
        own = [as_message(message, plain.roles[message.role]) for message in messages]
        assert exactly(own) == exactly([shown(message) for message in conversation.messages])
    return list(found)


def row(messages: object, **more: Any) -> bytes:
    return json.dumps({"messages": messages, **more}, ensure_ascii=False).encode()


def called(arguments: object, **more: Any) -> bytes:
    """A row with one call; a function's further keys may be given."""
    function = {"name": "f", "arguments": arguments, **more}
    return row([user("q"), assistant("", tool_calls=[{"type": "function", "function": function}])])


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
    "tools": row(TURNS, tools=[]),
    "no tools": row(TURNS, tools=None),
    "a system prompt": row(TURNS, system="s"),
    "variables": row(TURNS, chat_template_kwargs={}),
    "a weight": row([user("q"), {**assistant("a"), "weight": 1}]),
    "a mask": row([user("q"), {**assistant("a"), "masked": False}]),
    "null weights": row([{**user("q"), "train": None}, TURNS[1]]),
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


@pytest.mark.parametrize("name", DECODED)
def test_decoded(name: str) -> None:
    assert check([DECODED[name]]) == [0]


@pytest.mark.parametrize("name", LEFT)
def test_left_to_the_reader(name: str) -> None:
    assert check([LEFT[name]]) == []


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


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("locality", [READS_CALLS, READS_NONE, READS_NAMES])
def test_hostile_bytes_are_read_equally_if_at_all(name: str, locality: Locality) -> None:
    check([HOSTILE[name], row(TURNS)], locality=locality)


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


def with_column(value: bytes) -> bytes:
    return row(TURNS)[:-1] + b', "x": ' + value + b"}"


@pytest.mark.parametrize("name", BROKEN)
def test_broken_values_of_a_known_column(name: str) -> None:
    assert check([with_column(b"1"), with_column(BROKEN[name]), with_column(b"2")]) == [0, 2]


@pytest.mark.parametrize("name", BROKEN)
def test_broken_values_of_a_new_column(name: str) -> None:
    assert check([row(TURNS), with_column(BROKEN[name]), row(TURNS)]) == [0, 2]


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_null_contents_are_decoded_but_not_drafted(role: str) -> None:
    """The reader refuses them, so that a draft must not take them."""
    data = row([{"role": role, "content": None}, *TURNS])
    with pytest.raises(RowError, match="content is null"):
        Normaliser(MESSAGES).conversations(data)
    plain = PlainRows(MESSAGES, READS_CALLS)
    draft = Draft(Shapes(READS_CALLS, plain.roles), lambda message: {**message, "content": message["content"] or ""})
    plain.read([data, row(TURNS)], (), (), draft.add_plain)
    assert draft.batch().rows == [1]


HUGE: Final = b"9" * 310  # an integer beyond any float


@pytest.mark.parametrize("data", [with_column(HUGE), called({"a": 10**310})], ids=["a column", "arguments"])
def test_huge_integers(data: bytes) -> None:
    assert check([data]) == [0]


@pytest.mark.parametrize("column", [HUGE + b', "y": ' + b"[" * 3000 + b"]" * 3000, b"[" * 990 + HUGE + b"]" * 990])
def test_huge_integers_in_deep_rows(column: bytes) -> None:
    with suppress(RowError):  # read or refused, but nothing else
        Normaliser(MESSAGES).conversations(with_column(column))


def test_special_tokens_beside_huge_integers() -> None:
    data = (TEXT % b"\\u003c|im_end|>")[:-1] + b', "x": ' + HUGE + b"}"
    assert SpecialTextFinder(("<|im_end|>",)).find([data])[0] == {0: "<|im_end|>"}


# ---- columns, keys, roles


def test_columns_are_learned_up_to_a_limit() -> None:
    plain = PlainRows(MESSAGES, READS_CALLS)
    wide = [row(TURNS, **{f"c{number}": number}) for number in range(210)]
    assert list(decode(plain, wide)) == list(range(200))
    assert list(decode(plain, [wide[209], wide[0], row(TURNS), row(TURNS, c0=1, c199=2)])) == [1, 2, 3]
    assert check([row(TURNS, **{f"c{number}": 0 for number in range(201)}), row(TURNS, c0=0)]) == [1]


def test_other_columns_are_not_learned_with_new_ones() -> None:
    plain = PlainRows(MESSAGES, READS_CALLS)
    assert not decode(plain, [row(TURNS, x=1, tools=[]), row(TURNS, images=[]), row(TURNS, system="s")])
    assert list(decode(plain, [row(TURNS, x=1)])) == [0]


@pytest.mark.parametrize("key", WEIGHT_KEYS)
def test_weights_are_left_to_the_reader(key: str) -> None:
    assert check([row([user("q"), {**assistant("a"), key: 1}])]) == []
    named = MESSAGES.__class__(**{**_fields(MESSAGES), "weight_keys": ("name",)})
    assert check([row([user("q"), {**assistant("a"), "name": None}]), row(TURNS)], named) == [1]


def _fields(mapping: Mapping) -> dict[str, Any]:
    names = ("format", "columns", "role_key", "content_key", "roles")
    return {name: getattr(mapping, name) for name in names}


def test_keys_that_the_template_reads() -> None:
    named = row([{**user("q"), "name": "n"}, TURNS[1]])
    calling = row([user("q"), calls("f"), TURNS[1]])
    assert check([named, calling], locality=READS_CALLS) == [0, 1]
    assert check([named, calling], locality=READS_NAMES) == [1]
    assert check([named, calling], locality=READS_NONE) == [0]


def test_rows_among_the_others_are_left() -> None:
    many = [row(TURNS)] * 150
    assert list(decode(PlainRows(MESSAGES, READS_CALLS), many, {0, 63, 64, 149})) == [
        number for number in range(150) if number not in (0, 63, 64, 149)
    ]


def test_sharegpt() -> None:
    def shared(*turns: tuple[str, str], **more: Any) -> bytes:
        said = [{"from": role, "value": value} for role, value in turns]
        return json.dumps({"conversations": said, **more}).encode()

    rows = [
        shared(("human", "q"), ("gpt", "a")),
        shared(("system", "s"), ("user", "q"), ("bard", ""), ("observation", "t"), id=1),
        shared(("human", "q"), ("function_call", '{"name": "f", "arguments": {}}'), ("gpt", "a")),
        shared(("human", "q")),
        json.dumps({"conversations": [{"from": "gpt", "value": "a", "role": "user"}]}).encode(),
        json.dumps({"conversations": [{"from": "gpt", "value": "a", "content": "b"}]}).encode(),
        row(TURNS),
    ]
    assert check(rows, SHAREGPT) == [0, 1]


# ---- any rows

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**66), 2**66), st.floats(allow_nan=False, allow_infinity=False))
    | st.text(max_size=4),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=5,
)
FUNCTIONS = st.fixed_dictionaries(
    {"name": st.sampled_from(("f", "", "ü\x01")), "arguments": st.dictionaries(st.text(max_size=3), JSON, max_size=2)}
)
CALLS = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTIONS}), max_size=2)
SAYINGS = st.fixed_dictionaries(
    {"role": st.sampled_from(("user", "assistant", "tool", "system")), "content": st.text(max_size=5)},
    optional={"name": st.text(max_size=2), "id": st.none() | st.just(1), "tool_calls": CALLS},
)
RECORDS = st.fixed_dictionaries(
    {"messages": st.lists(SAYINGS, max_size=4).map(lambda said: [*said, *TURNS])},
    optional={"x": JSON, "tools": st.none(), "\u00fc": JSON},
)


@settings(max_examples=150, deadline=None)
@given(st.lists(RECORDS, min_size=1, max_size=3), st.booleans())
def test_any_rows(records: list[dict[str, Any]], ascii_only: bool) -> None:
    check([json.dumps(record, ensure_ascii=ascii_only).encode(errors="replace") for record in records])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(DECODED.values())), st.integers(0, 400), st.binary(max_size=3), st.integers(0, 2))
def test_any_damage(data: bytes, at: int, put: bytes, cut: int) -> None:
    at %= len(data) + 1
    damaged = data[:at] + put + data[at + cut :]
    try:
        found = check([row(TURNS, x=1, id=1, source=1), damaged])
    except RowError as error:
        assert "null" in error.reason  # see test_null_contents_are_decoded_but_not_drafted
        return
    assert found[0] == 0
