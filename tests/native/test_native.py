"""The compiled loops: exact on any bytes, and safe with any arguments. How they fare in their places is tested there,
together with their twins in Python (`inner_loops`)."""

from __future__ import annotations

import json
import sys
import tracemalloc
import unicodedata
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.native import Layout, native

LAYOUT = Layout(
    b"messages", b"role", b"content", b"tool_calls", (b"name",), (b"id", "ü".encode()), (b"assistant", b"user"), 1
)
TABLE = np.arange(0x110000).astype(np.uint8)


pytestmark = pytest.mark.skipif(native is None, reason="installed without a compiler")


# ---- reading

TEXT = st.text(max_size=12) | st.sampled_from(("", " ", "\u3000\n", "a\\b", '"', "\x7f", "\ufeff", "é" * 9, "x" * 40))
CALLS: st.SearchStrategy[Any] = st.lists(st.dictionaries(TEXT, TEXT, max_size=2), max_size=2)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(("user", "assistant")), "content": TEXT | st.none()},
        optional={"name": TEXT | st.none(), "tool_calls": CALLS},
    ),
    max_size=4,
)
SCALARS = TEXT | st.none() | st.booleans() | st.integers(-(10**14), 10**14) | st.sampled_from((0.5, -1.25, 1e-7, 1e300))
ROWS = st.fixed_dictionaries({"messages": MESSAGES}, optional={"id": SCALARS, "ü": SCALARS, "other": SCALARS})


def surely_plain(row: Any) -> bool:
    """Whether a row must be read: nothing in it is unusual."""
    said = [message["content"] or "" for message in row["messages"]]
    known = [value for message in row["messages"] for key, value in message.items() if key == "name"] + said
    known += [value for key, value in row.items() if key != "messages" and isinstance(value, str)]
    return (
        row.keys() <= {"messages", "id", "ü"}
        and any(message["role"] == "assistant" for message in row["messages"])
        and not any(unicodedata.category(c) in ("Cc", "Cs") and c not in "\t\n\r" for text in known for c in text or "")
        and not any("tool_calls" in message for message in row["messages"])
        and not any(isinstance(value, float) and abs(value) not in (0.5, 1.25) for value in row.values())
    )


def read(rows: list[bytes]) -> dict[int, list[dict[str, Any]]]:
    """The rows that were read, with their messages."""
    assert native is not None
    numbers, counts, roles, words, odd = native.read(rows, bytes(len(rows)), LAYOUT)
    assert len(roles) == len(words) == sum(counts)
    assert len(numbers) == len(counts)
    calls = dict(odd)
    found: dict[int, list[dict[str, Any]]] = {}
    place = 0
    for number, count in zip(numbers, counts, strict=True):
        for _ in range(count):
            content = words[place] if words[place] is None else words[place].decode()  # type: ignore[union-attr]
            message: dict[str, Any] = {"role": LAYOUT.roles[roles[place]].decode(), "content": content}
            if calls.get(place) is not None:
                message["tool_calls"] = calls[place]
            assert (place in calls) == (not (content or "").strip() or "tool_calls" in message)
            found.setdefault(number, []).append(message)
            place += 1
    return found


def expected(row: bytes) -> list[dict[str, Any]] | None:
    """What a row says, by another decoder; its calls as they stand."""
    value = json.loads(row)
    return [{key: own for key, own in message.items() if key != "name"} for message in value["messages"]]


def check(rows: list[bytes]) -> dict[int, list[dict[str, Any]]]:
    found = read(rows)
    for number, messages in found.items():
        for message, wanted in zip(messages, expected(rows[number]) or (), strict=True):
            if "tool_calls" in message:
                message["tool_calls"] = json.loads(message["tool_calls"])
            assert message == wanted
    return found


@settings(max_examples=300, deadline=None)
@given(st.lists(ROWS, max_size=4), st.booleans(), st.sampled_from((None, 1)))
def test_rows_are_read_as_they_stand(rows: list[dict[str, Any]], ascii_only: bool, indent: int | None) -> None:
    data = [json.dumps(row, ensure_ascii=ascii_only, indent=indent).encode(errors="surrogatepass") for row in rows]
    found = check(data)
    assert {number for number, row in enumerate(rows) if surely_plain(row)} <= found.keys()


PLAIN = (
    '{"messages": [{"role": "user", "content": "é \\n\\ud83d\\ude00 日本 \\"", "name": null}, '
    '{"content": null, "role": "assistant", "tool_calls": [{"a": "[\\"]"}]}], "id": -12.5, "ü": "x"}'
).encode()


@settings(max_examples=1500, deadline=None)
@given(st.integers(0, len(PLAIN)), st.binary(max_size=3) | st.sampled_from((b'"', b"\\", b"\\u", b"{", b"]", b",")),
       st.integers(0, 3))  # fmt: skip
@example(len(PLAIN), b"", 0)
def test_damage_is_never_read_otherwise(at: int, put: bytes, cut: int) -> None:
    """Damage of a value that is given on as it stands is found by whoever looks at it."""
    damaged = PLAIN[:at] + put + PLAIN[at + cut :]
    for messages in read([damaged]).values():
        try:
            wanted = expected(damaged)
        except (ValueError, RecursionError):
            calls = [message["tool_calls"] for message in messages if "tool_calls" in message]
            with pytest.raises(ValueError):
                list(map(json.loads, calls))
            continue
        assert wanted is not None
        assert [message["content"] for message in messages] == [message["content"] for message in wanted]


@pytest.mark.parametrize("size", range(len(PLAIN)))
def test_cut_rows_are_left(size: int) -> None:
    assert not read([PLAIN[:size]])


def test_very_deep_nesting_is_left_or_given_on() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    assert not read([b'{"messages": ' + deep + b"}", deep, deep[:100_000]])
    row = b'{"messages": [{"role": "assistant", "content": "", "tool_calls": ' + deep + b"}]}"
    assert read([row])[0][0]["tool_calls"] == deep


@pytest.mark.parametrize(
    "arguments",
    [
        (b"", b"", LAYOUT),
        ([b"{}"], b"", LAYOUT),
        (["{}"], b"\0", LAYOUT),
        ([], b"\0", LAYOUT),
        ([], b"", LAYOUT[:-1]),
        ([], b"", LAYOUT._replace(roles=("user",))),  # type: ignore[arg-type]
        ([], b"", LAYOUT._replace(columns=[b"id"])),  # type: ignore[arg-type]
        ([], b"", LAYOUT._replace(roles=(b"a",) * 256)),
    ],
)
def test_wrong_arguments_of_read(arguments: tuple[Any, ...]) -> None:
    assert native is not None
    with pytest.raises((TypeError, ValueError)):
        native.read(*arguments)


# ---- texts


def fill(words: list[Any], numbers: list[int], offsets: list[int], trims: list[bool]) -> tuple[list[bytes], list[int]]:
    assert native is not None
    texts, sizes = native.fill(
        words, np.array(numbers, np.int64), np.array(offsets, np.int64), [b"<", b"", "é".encode()], [b">", b"|", b""],
        np.array(trims, np.bool_),
    )  # fmt: skip
    return texts, np.frombuffer(sizes, np.int64).tolist()


def test_texts_are_put_together() -> None:
    texts, sizes = fill(["a", " ü ".encode(), "日本", ""], [0, 1, 2, 0], [0, 2, 2, 4], [False, True, False])
    assert texts == ["<a>ü|".encode(), b"", "é日本<>".encode()]
    assert sizes == [1, 2, 6, 0]


def test_white_space_is_what_python_strips() -> None:
    characters = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c < 0xE000]
    words = [f"{c}a{c}{c}".encode() for c in characters] + [f" {c}\n" for c in characters]
    texts, _ = fill(words, [1] * len(words), list(range(len(words) + 1)), [True] * 3)
    expected = [f"{c}a{c}{c}".strip() for c in characters] + [f" {c}\n".strip() for c in characters]
    assert texts == [f"{text}|".encode() for text in expected]


@pytest.mark.parametrize("word", [b"\x80\x80", b"a\xe2", b"\xe2\x80", b"\xc2", b"\xe3\x80\x80\xe3"])
def test_trimming_what_is_not_utf8_stays_within_the_word(word: bytes) -> None:
    assert fill([word], [1], [0, 1], [True] * 3)[0][0].endswith(b"|")


@pytest.mark.parametrize(
    ("words", "numbers", "offsets"),
    [
        (["a"], [3], [0, 1]),
        (["a"], [-1], [0, 1]),
        (["a"], [0, 0], [0, 2]),
        (["a"], [0], [0, 2]),
        (["a"], [0], [1, 1]),
        (["a", "b"], [0, 0], [0, 3, 2]),
        (["a", "b"], [0, 0], [0, -1, 2]),
        (["a"], [0], []),
        ([1], [0], [0, 1]),
        (["\ud800"], [0], [0, 1]),
    ],
)
def test_wrong_arguments_of_fill(words: list[Any], numbers: list[int], offsets: list[int]) -> None:
    with pytest.raises((TypeError, ValueError)):
        fill(words, numbers, offsets, [False] * 3)


# ---- bytes and characters


@given(st.lists(st.text("ab<|/\\u", max_size=9), max_size=4))
def test_pairs(texts: list[str]) -> None:
    assert native is not None
    wanted = {"/u": 1, "<|": 2, "</": 4, "\\u": 1, "bb": 8}
    ordered = sorted(wanted)
    found = native.pairs(
        [t.encode() for t in texts], "".join(ordered).encode(), bytes(map(wanted.__getitem__, ordered))
    )
    for text, bits in zip(texts, found, strict=True):
        assert bits == sum({bit for pair, bit in wanted.items() if pair in text})


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=4))
def test_kinds(texts: list[str]) -> None:
    assert native is not None
    found = native.kinds([text.encode() for text in texts], TABLE)
    for text, kinds in zip(texts, found, strict=True):
        assert kinds == reduce(or_, (int(TABLE[ord(c)]) for c in text if not c.isascii()), 0)


@pytest.mark.parametrize(
    "text", [b"\xff", b"\xc3", b"aaaaaaaaa\xe6\x97", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf"]
)
def test_kinds_of_what_is_not_utf8(text: bytes) -> None:
    assert native is not None
    with pytest.raises(ValueError, match="not UTF-8"):
        native.kinds([text], TABLE)


def test_wrong_arguments_of_pairs_and_kinds() -> None:
    assert native is not None
    for wrong in (([b""], b"a", b"\1"), ([b""], b"ab", b""), (["a"], b"ab", b"\1")):
        with pytest.raises(ValueError):
            native.pairs(*wrong)  # type: ignore[arg-type]
    for texts, table in (([b""], TABLE[1:]), (["a"], TABLE)):
        with pytest.raises(ValueError):
            native.kinds(texts, table)  # type: ignore[arg-type]


@given(st.binary(max_size=30) | st.text("a\n\r", max_size=12).map(str.encode))
def test_split(text: bytes) -> None:
    assert native is not None
    assert native.split(text) == text.split(b"\n")


def test_split_takes_bytes_alone() -> None:
    assert native is not None
    with pytest.raises(TypeError):
        native.split(bytearray(b"a"))  # type: ignore[arg-type]


def test_nothing_is_kept() -> None:
    assert native is not None
    rows = [PLAIN, PLAIN[:50], PLAIN] * 10

    def work() -> None:
        read(rows)
        fill(["a", b" \xff"], [0, 1], [0, 2], [True] * 3)
        native.pairs(rows, b"<|", b"\1")
        native.kinds(rows, TABLE)
        native.split(b"a\nb" * 100)
        for wrong in ("\ud800", None):
            with pytest.raises((TypeError, ValueError)):
                fill(["a", wrong], [0, 1], [0, 1, 2], [False] * 3)

    for _ in range(3):
        work()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(50):
        work()
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert kept < 20_000
