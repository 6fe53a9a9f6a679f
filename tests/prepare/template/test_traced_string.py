"""Laws of traced strings: they equal the original strings, and each character knows its origin."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from penstock.prepare.template.budget import Budget
from penstock.prepare.template.tracing.provenance import Traced, TracedSpan, concat, trace, traced

ALPHABET = "ab \n\té中"
Owner = tuple[int | None, int]  # message and label


def owners(text: str) -> list[Owner]:
    """The owner of each character."""
    layers: list[list[int | None]] = [[None] * len(text), [None] * len(text)]
    for layer, spans in zip(layers, (text.spans, text.labels) if isinstance(text, Traced) else (), strict=False):
        for start, end, origin, _ in spans:
            assert 0 <= start < end <= len(text)
            layer[start:end] = [origin] * (end - start)
        assert all(
            (one.end, one.message, one.looped) != (two.start, two.message, two.looped) for one, two in pairwise(spans)
        )
    return [(message, label or 0) for message, label in zip(*layers, strict=True)]


def messages(text: str) -> list[int | None]:
    return [message for message, _ in owners(text)]


@st.composite
def strings(draw: st.DrawFn, alphabet: str = ALPHABET) -> Traced:
    """A string whose characters have random owners and labels."""
    texts = st.text(alphabet, max_size=5)
    parts = draw(st.lists(st.tuples(texts, st.sampled_from([None, 0, 1, 2]), st.sampled_from([0, 3, 4])), max_size=4))
    return concat(part(*one) for one in parts)


def part(text: str, message: int | None, label: int) -> Traced:
    whole = [
        (TracedSpan(0, len(text), origin),) if origin is not None and text else ()
        for origin in (message, label or None)
    ]
    return Traced(text, whole[0], Budget(), whole[1])


class Pair:
    """A string as (character, owner) pairs, the model for slicing and joining."""

    def __init__(self, text: str) -> None:
        self.items = list(zip(str.__str__(text), owners(text), strict=True))

    def holds(self, piece: str, start: int) -> bool:
        return self.items[start : start + len(piece)] == Pair(piece).items


def check(result: str, expected: str) -> None:
    assert result == expected
    spans = result.spans if isinstance(result, Traced) else ()
    assert all(before.end <= after.start for before, after in pairwise(spans))


bounds = st.none() | st.integers(-12, 12)


@given(strings(), bounds, bounds)
def test_slices(text: Traced, start: int | None, stop: int | None) -> None:
    found = text[start:stop]
    check(found, str.__str__(text)[start:stop])
    assert owners(found) == owners(text)[start:stop]
    assert set(owners(text[start:stop:2])) <= {(None, label) for _, label in owners(text)} | {(None, 0)}


@given(strings())
def test_characters_and_indices(text: Traced) -> None:
    for one in (
        list(text),
        [text[index] for index in range(len(text))],
        [text[k - len(text)] for k in range(len(text))],
    ):
        assert one == list(str.__str__(text))
        assert [owners(character)[0] for character in one] == owners(text)
    with pytest.raises(IndexError):
        text[len(text)]


CUTS: dict[str, Callable[[Any], Any]] = {
    "strip": lambda s: [s.strip()],
    "strip letters": lambda s: [s.strip("ab")],
    "lstrip": lambda s: [s.lstrip()],
    "rstrip": lambda s: [s.rstrip("b ")],
    "removeprefix": lambda s: [s.removeprefix("a")],
    "removesuffix": lambda s: [s.removesuffix("b")],
    "split": lambda s: s.split(),
    "split once": lambda s: s.split(None, 1),
    "split by": lambda s: s.split("a"),
    "split by, twice": lambda s: s.split("a", 2),
    "rsplit": lambda s: s.rsplit(),
    "rsplit once": lambda s: s.rsplit(None, 1),
    "rsplit by": lambda s: s.rsplit(sep="ab", maxsplit=1),
    "splitlines": lambda s: s.splitlines(),
    "splitlines keeping": lambda s: s.splitlines(True),
    "partition": lambda s: list(s.partition("b")),
    "rpartition": lambda s: list(s.rpartition("b")),
}


@pytest.mark.parametrize("name", CUTS)
@given(text=strings())
def test_pieces_keep_the_origin_of_each_character(name: str, text: Traced) -> None:
    pieces, expected = CUTS[name](text), CUTS[name](str.__str__(text))
    assert pieces == expected
    whole, position = Pair(text), 0
    for piece in pieces:  # in order: each occurs after the previous one
        starts = (start for start in range(position, len(text) + 1) if whole.holds(piece, start))
        start = next(starts, None)
        assert start is not None
        position = start + len(piece)


@given(strings(), strings(), st.text(ALPHABET, max_size=4))
def test_concatenation(left: Traced, right: Traced, plain: str) -> None:
    for found, parts in ((left + right, (left, right)), (left + plain, (left, plain)), (plain + right, (plain, right))):
        check(found, "".join(map(str.__str__, parts)))
        assert owners(found) == owners(parts[0]) + owners(parts[1])


@given(strings(), st.lists(strings() | st.text(ALPHABET, max_size=3), max_size=4))
def test_joins(separator: Traced, items: list[str]) -> None:
    found = separator.join(items)
    check(found, str.__str__(separator).join(items))
    expected: list[Owner] = []
    for number, item in enumerate(items):
        expected += (owners(separator) if number else []) + owners(item)
    assert owners(found) == expected


@given(strings("ab"), st.text("ab", max_size=2), strings("xy"), st.integers(-1, 4))
def test_replace_keeps_the_origin_of_new_and_remaining_text(text: Traced, old: str, new: Traced, count: int) -> None:
    found = text.replace(old, new, count)
    check(found, str.__str__(text).replace(old, new, count))
    kept = [owner for character, owner in zip(found, messages(found), strict=True) if character in "ab"]
    left = str.__str__(text).replace(old, "", count) if old else text
    if not old or len(set(messages(text))) <= 1:
        assert len(kept) == len(left)
        assert not kept or old == "" or set(kept) == set(messages(text))
    if not old:
        assert kept == messages(text)
    inserted = [owner for character, owner in zip(found, messages(found), strict=True) if character in "xy"]
    times = len(inserted) // len(new) if new else 0
    assert inserted == messages(new) * times


LOST: dict[str, Callable[[Any], Any]] = {
    "upper": lambda s: s.upper(),
    "title": lambda s: s.title(),
    "times": lambda s: s * 2,
    "once": lambda s: s * 1,
    "step": lambda s: s[::-1],
    "center": lambda s: s.center(20),
    "repr": lambda s: repr(s),
    "format": lambda s: f"{s:>9}",
    "in a list": lambda s: str([s]),
    "encode": lambda s: s.encode().decode(),
}


@pytest.mark.parametrize("name", LOST)
def test_rewriting_text_returns_a_plain_string(name: str) -> None:
    text = trace("a b", 1, Budget())
    found = LOST[name](text)
    assert type(found) is str
    assert found == LOST[name]("a b")


@pytest.mark.parametrize("name", [name for name in LOST if name not in ("repr", "format", "in a list", "encode")])
@given(text=strings())
def test_rewriting_text_keeps_a_label_of_all_of_it_and_no_owner(name: str, text: Traced) -> None:
    found = LOST[name](text)
    assert found == LOST[name](str.__str__(text))
    labels = [label for _, label in owners(text)]
    if name in ("times", "once"):
        assert owners(found) == [(None, label) for label in labels] * (2 if name == "times" else 1)
    else:
        assert set(owners(found)) <= {(None, labels[0] if len(set(labels)) == 1 else 0)}


def test_nested_values_are_traced_and_compare_equal() -> None:
    value = {"a": ["x", {"b": ("y", 1, None, "")}], 5: True}
    found = trace(value, 3, Budget())
    assert found == value
    assert messages(found["a"][1]["b"][0]) == [3]
    assert [messages(key) for key in found if isinstance(key, str)] == [[3]]
    assert type(found["a"][1]["b"]) is tuple


def test_printing_and_markup() -> None:
    text = trace("<", 0, Budget())
    assert str(text) is text
    assert text + Markup("<") == Markup("&lt;<")
    assert Markup("<") + text == Markup("<&lt;")
    assert traced(text) is text
    with pytest.raises(TypeError):
        text + 1


def test_adjacent_spans_of_a_message_are_merged() -> None:
    budget = Budget()
    parts = [trace("a", 1, budget), trace("b", 1, budget), "c", trace("d", 2, budget)]
    assert concat(parts).spans == (TracedSpan(0, 2, 1), TracedSpan(3, 4, 2))
