"""Segment counts of SentencePiece-style tokenizers equal those by the reference's offsets."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.native import native
from penstock.prepare.encode import example_batch
from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.encode.example_batch import aligned, segment_counts
from penstock.prepare.regions.segments import Segments
from penstock.prepare.tokenizer import vocabulary as pieces_module
from penstock.prepare.tokenizer.vocabulary import Rule, TokenPieces, Vocabulary, token_pieces
from tests.prepare.encode.test_align import CROSSINGS
from tests.support.spm_tokenizers import SHAPES, TURNS

pytestmark = [pytest.mark.slow, pytest.mark.skipif(native is None, reason="installed without a compiler")]

RULES = {
    "gemma": Rule.BY_PIECES,
    "mistral": Rule.BY_PIECES | Rule.PREPENDS,
    "metaspace": Rule.BY_PIECES | Rule.PREPENDS_UNLESS_SPACE,
    "metaspace, first": Rule.BY_PIECES | Rule.PREPENDS_UNLESS_SPACE | Rule.ONLY_FIRST,
    "metaspace, never": Rule.BY_PIECES,
    "t5": Rule.BY_PIECES | Rule.PREPENDS_UNLESS_SPACE | Rule.DROPS_SPACE,
}
WORDS = [
    "hello",
    "I",
    " ",
    "  ",
    "   ",
    "\n",
    "\t",
    "▁",
    "▁▁",
    " ▁",
    "é",
    "日本",
    "😀",
    "x",
    ".",
    "ﬁ",
    "\u00a0",
    "<0x0A>",
    "{",
    "{}",
    "}<",
]
TEXTS = st.lists(st.sampled_from([*WORDS, *TURNS, *TURNS]), max_size=12).map("".join)


class Subject:
    """A tokenizer, and the counts by the reference's offsets."""

    def __init__(self, tokenizer_json: bytes) -> None:
        self.vocabulary = Vocabulary(tokenizer_json)
        self.encoder = Encoder(tokenizer_json, self.vocabulary, fast=False)

    def counts(self, text: str, cuts: list[int], crossing: list[int]) -> tuple[Any, Any, int]:
        """For one text: actual counts, expected counts, and whether offsets were needed."""
        data = text.encode()
        encoded = self.encoder.reference([data])
        parts = Segments(
            offsets=np.array([0, len(cuts)]),
            ends=np.array(cuts, np.int64),
            roles=np.zeros(len(cuts), np.uint8),
            parts=np.zeros(len(cuts), np.uint8),
            messages=np.zeros(len(cuts), np.int32),
            crossing=np.array(crossing, np.uint8),
            known=np.ones(1, bool),
        )
        ends = self.encoder._reference.token_ends(data)
        tables = self.vocabulary.byte_lengths, self.vocabulary.pieces
        found = aligned([data], encoded.ids, encoded.offsets, parts, tables, lambda _: ends)
        wanted = [array.tolist() for array in segment_counts(ends, parts.ends, parts.crossing)]
        return [found.ends.tolist(), found.crossed.tolist()], wanted, found.inexact


def boundaries(text: str) -> list[int]:
    return [len(text[: k + 1].encode()) for k in range(len(text))]


@pytest.fixture(scope="module")
def subjects() -> dict[str, Subject]:
    return {name: Subject(make()) for name, make in SHAPES.items()}


@pytest.mark.parametrize("name", SHAPES)
def test_token_positions_match_the_reference(name: str, subjects: dict[str, Subject]) -> None:
    subject = subjects[name]
    assert subject.vocabulary.pieces.rule == RULES[name]
    by_pieces = 0

    @settings(max_examples=300, deadline=None)
    @given(TEXTS, st.data())
    def law(text: str, data: st.DataObject) -> None:
        nonlocal by_pieces
        cuts = boundaries(text)
        crossing = data.draw(st.lists(st.sampled_from(CROSSINGS), min_size=len(cuts), max_size=len(cuts)))
        found, wanted, needed = subject.counts(text, cuts, crossing)
        assert found == wanted
        by_pieces += bool(text) and not needed

    law()
    assert by_pieces > 30


PLAIN = ["<s> hello</s>  x <s>hello   x", " hello", "hello ▁ x▁▁x", "<s><s>hello </s> ", "日本<s>日本", "a  b\n<s>.\n"]


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "t5"])
def test_no_offsets_are_needed(name: str, subjects: dict[str, Subject]) -> None:
    for text in PLAIN:
        found, wanted, needed = subjects[name].counts(text, boundaries(text), [False] * len(text))
        assert (found, needed) == (wanted, 0)


def with_rule(rule: int) -> Callable[[Vocabulary], TokenPieces]:
    return lambda vocabulary: token_pieces(vocabulary)._replace(rule=rule)


def without_spaces_in_added(vocabulary: Vocabulary) -> TokenPieces:
    """Gemma's runs of ▁ as ordinary added tokens: matched against the text literally."""
    found = token_pieces(vocabulary)
    kinds = found.kinds.copy()
    kinds[kinds == pieces_module.PieceKind.ADDED_OR_PIECE] = pieces_module.PieceKind.ADDED
    return found._replace(kinds=kinds)


@pytest.mark.parametrize(
    ("name", "sabotage"),
    [
        pytest.param("gemma", without_spaces_in_added, id="runs of spaces"),
        pytest.param("mistral", with_rule(Rule.BY_PIECES), id="the prepended one"),
        pytest.param("metaspace", with_rule(Rule.BY_PIECES | Rule.PREPENDS), id="before spaces too"),
        pytest.param(
            "metaspace, first", with_rule(Rule.BY_PIECES | Rule.PREPENDS_UNLESS_SPACE), id="before each section"
        ),
    ],
)
def test_sabotaged_rules_are_detected(name: str, sabotage: Callable[[Vocabulary], TokenPieces]) -> None:
    """Without a rule, tokens no longer account for the text, so offsets are needed; masks stay right."""
    subject = Subject(SHAPES[name]())
    subject.vocabulary.__dict__["pieces"] = sabotage(subject.vocabulary)
    results = [subject.counts(text, boundaries(text), [False] * len(text)) for text in PLAIN]
    assert all(found == wanted for found, wanted, _ in results)
    assert any(needed for _, _, needed in results)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"normalizer": {"type": "Prepend", "prepend": "▁"}}, id="prepends alone"),
        pytest.param({"pre_tokenizer": {"type": "WhitespaceSplit"}}, id="splits alone"),
        pytest.param({"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first"}}, id="_"),
    ],
)
def test_unknown_configurations_use_offsets(change: dict[str, Any]) -> None:
    changed = {**json.loads(SHAPES["mistral"]()), **change}
    assert token_pieces(Vocabulary(json.dumps(changed).encode())).rule == 0


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param("mistral", {"normalized": True}, id="matched in normalised text"),
        pytest.param("mistral", {"content": "▁▁▁"}, id="a piece as well"),
        pytest.param("metaspace", {"rstrip": True}, id="takes spaces along"),
    ],
)
def test_added_tokens_that_obscure_section_starts_use_offsets(name: str, change: dict[str, Any]) -> None:
    changed = json.loads(SHAPES[name]())
    token = changed["added_tokens"][1]
    assert token["content"] == "<s>"
    token |= change
    if "content" in change:
        token["id"] = changed["model"]["vocab"]["▁▁▁"]
        changed["added_tokens"].sort(key=lambda token: token["id"])
    subject = Subject(json.dumps(changed).encode())
    text = f"x {token['content']} x</s> x"
    for one, by_offsets in ((text, 1), ("hello</s> x", 0)):
        found, wanted, needed = subject.counts(one, boundaries(one), [False] * len(one))
        assert (found, needed) == (wanted, by_offsets)


def test_offsets_are_used_without_the_compiled_core(
    subjects: dict[str, Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example_batch, "native", None)
    for text in PLAIN:
        found, wanted, needed = subjects["gemma"].counts(text, boundaries(text), [False] * len(text))
        assert (found, needed) == (wanted, 1)
