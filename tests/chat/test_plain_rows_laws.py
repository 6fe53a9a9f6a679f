"""Any rows, and plain rows with any damage, are decoded as the reader of rows reads them, or left to it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.chat.plain_rows import Plain, PlainRows
from penstock.errors import RowError
from tests.chat.plain_row_cases import (
    DECODED,
    HOSTILE,
    LEFT,
    MESSAGES,
    READS_CALLS,
    TURNS,
    check,
    decode,
    row,
    weighed,
)

pytestmark = pytest.mark.usefixtures("inner_loops")

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
WEIGHTS = st.none() | st.booleans() | st.integers(-1, 2) | st.floats(-1, 3) | st.sampled_from((10**400, 1e308, "1", []))
SAYINGS = st.fixed_dictionaries(
    {"role": st.sampled_from(("user", "assistant", "tool", "system")), "content": st.text(max_size=5)},
    optional={
        "name": st.text(max_size=2),
        "id": st.none() | st.just(1),
        "tool_calls": CALLS,
        "weight": WEIGHTS,
        "masked": WEIGHTS,
    },
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


MIXED = st.sampled_from(sorted({**DECODED, **LEFT, **HOSTILE}.values()))


@settings(max_examples=60, deadline=None)
@given(st.lists(MIXED, max_size=150), st.sets(st.integers(0, 149)))
def test_rows_are_read_alike_among_any_others(data: list[bytes], others: set[int]) -> None:
    """Whatever is refused before, between and after them."""
    known = PlainRows(MESSAGES, READS_CALLS)
    decode(known, [row(TURNS, x=1, id=1, source=1, **{"ключ": 1, "": 1})])
    together, weights = weighed(known, data, others)
    assert list(together) == sorted(together) and others.isdisjoint(together) and weights.keys() <= together.keys()
    for number, one in enumerate(data):
        alone, weight = weighed(known, [one])
        assert shown_by(together.get(number)) == (None if number in others else shown_by(alone.get(0)))
        assert weights.get(number) == (weight.get(0) if number in together else None)


def shown_by(decoded: Plain | None) -> str | None:
    return None if decoded is None else repr((decoded.messages, decoded.tools))
