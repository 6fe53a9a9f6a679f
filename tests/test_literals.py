"""Searching for many literal strings equals searching with a regular expression of them, longest first."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from penstock.literals import Literals

words = st.text("ab<|", max_size=4)


@given(st.sets(words), st.text("ab<|", max_size=40))
def test_it_finds_what_an_expression_finds(contents: set[str], text: str) -> None:
    literals, longest = Literals(contents), sorted(filter(None, contents), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest))) if longest else re.compile(r"(?!)")
    expected = [match.span() for match in pattern.finditer(text)]
    assert list(literals.spans(text)) == expected
    assert literals.find(text) == (expected[0] if expected else None)
    assert literals.within(text) == {content for content in longest if content in text}
    assert bool(literals) == bool(longest)
    coded = Literals(content.encode() for content in contents)
    assert list(coded.spans(text.encode())) == expected
