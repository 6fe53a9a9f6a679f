"""What is decoded as plain would have been read equally; whatever has more to it is left to the reader of rows."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, Final

import pytest

from penstock.chat.formats import WEIGHT_KEYS, Mapping
from penstock.chat.locality import Locality
from penstock.chat.plain_rows import PlainRows
from penstock.chat.rows import Normaliser
from penstock.chat.shapes import Draft, Shapes
from penstock.chat.special_text import SpecialTextFinder
from penstock.errors import RowError
from tests.chat.plain_row_cases import (
    BROKEN,
    DECODED,
    HOSTILE,
    LEFT,
    MESSAGES,
    READS_CALLS,
    READS_NAMES,
    READS_NONE,
    SHAREGPT,
    TEXT,
    TURNS,
    called,
    check,
    decode,
    row,
    weighed,
    with_column,
)
from tests.chat.splitting import assistant, calls, user
from tests.chat.stencil_probes import made

pytestmark = pytest.mark.usefixtures("inner_loops")


@pytest.mark.parametrize("name", DECODED)
def test_decoded(name: str) -> None:
    assert check([DECODED[name]]) == [0]


@pytest.mark.parametrize("name", LEFT)
def test_left_to_the_reader(name: str) -> None:
    assert check([LEFT[name]]) == []


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("locality", [READS_CALLS, READS_NONE, READS_NAMES])
def test_hostile_bytes_are_read_equally_if_at_all(name: str, locality: Locality) -> None:
    check([HOSTILE[name], row(TURNS)], locality=locality)


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
    draft = Draft(Shapes(READS_CALLS, plain.roles), made("whole").adapter)
    plain.read([data, row(TURNS)], (), (), draft)
    assert draft.batch().rows == [1]


@pytest.mark.parametrize("content", [[], {}, 0, False, [{"type": "text", "text": "q"}]])
def test_contents_that_are_no_text_have_no_shape(content: object) -> None:
    assert Shapes(READS_CALLS, {}).code({"role": "user", "content": content}) is None


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
    assert not decode(plain, [row(TURNS, x=1, system="s"), row(TURNS, images=[]), row(TURNS, system="s")])
    assert list(decode(plain, [row(TURNS, x=1)])) == [0]


@pytest.mark.parametrize("tools", [[], [{"name": "f"}], None])
def test_tools_where_they_are_not_to_be_read(tools: object) -> None:
    data = [row(TURNS, tools=tools), row(TURNS)]
    for plain in (PlainRows(MESSAGES, READS_CALLS, tools=False), PlainRows(MESSAGES, READS_NONE)):
        assert list(decode(plain, data)) == [1]


@pytest.mark.parametrize("key", WEIGHT_KEYS)
def test_weights_are_told(key: str) -> None:
    plain = PlainRows(MESSAGES, READS_CALLS)
    rows = [row([user("q"), {**assistant("a"), key: value}]) for value in (1, 0, True, False, None)] + [row(TURNS)]
    found, weights = weighed(plain, rows)
    assert list(found) == list(range(6))
    expected = [1.0, 0.0, 1.0, 0.0] if key != "masked" else [0.0, 1.0, 0.0, 1.0]
    assert weights == {number: (None, weight) for number, weight in enumerate(expected)}
    check(rows)


def test_weights_and_new_columns_at_once() -> None:
    messages = [user("q"), {**assistant("a"), "weight": 0.5}]
    assert check([row(messages, x=1), json.dumps({"y": 1, "messages": messages}).encode()]) == [0, 1]


def test_weights_under_a_key_that_is_ignored_otherwise() -> None:
    named = MESSAGES.__class__(**{**_fields(MESSAGES), "weight_keys": ("name",)})
    rows = [row([user("q"), {**assistant("a"), "name": value}]) for value in (None, 0.5, "n")]
    assert check(rows[:2], named) == [0, 1]
    assert not decode(PlainRows(named, READS_CALLS), rows[2:])


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
