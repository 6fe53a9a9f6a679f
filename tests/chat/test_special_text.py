"""Special tokens are found in rows however JSON writes them, and nowhere else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.chat.special_text import SpecialTextFinder

pytestmark = pytest.mark.usefixtures("inner_loops")

ASCII = ("<|im_end|>", "<|im_start|>", "</s>", "[INST]", "\n", "x")
TOKENS = {"ascii": ASCII, "more": (*ASCII, "<｜end｜>", "é$")}
PIECES = st.sampled_from([*TOKENS["more"], "<", "|", "\\", "u003c", "/s>", "a", "ü", "日本", "\u0007", '"', "😀"])
ROWS = st.lists(st.tuples(st.lists(PIECES, max_size=6).map("".join), st.booleans(), st.booleans()), max_size=6)


@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
@given(rows=ROWS)
def test_found_are_the_rows_whose_text_has_one(tokens: tuple[str, ...], rows: list[tuple[str, bool, bool]]) -> None:
    written = [_written(*row) for row in rows]
    found, escaped = SpecialTextFinder(tokens).find(written)
    wanted = [t for t in tokens if len(t) > 1]
    assert set(found) == {n for n, (text, _, _) in enumerate(rows) if any(t in text for t in wanted)}
    assert all(token in rows[n][0] for n, token in found.items())
    assert escaped == {n for n, row in enumerate(written) if b"\\u" in row or b"\\/" in row}


def _written(text: str, ascii_only: bool, all_escaped: bool) -> bytes:
    """A row of JSON, as different programs write it."""
    row = json.dumps({"text": text}, ensure_ascii=ascii_only).replace("/", "\\/" if all_escaped else "/")
    return (row.replace("<", "\\u003C") if all_escaped else row).encode()
