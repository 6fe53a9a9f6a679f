"""Rows of a slice to batches of conversations: the first stage of the pipeline.

Rows that can't be read are rejected, with the reason. Where the template allows for stencils, usual rows are decoded
straight into a draft for them, and the batch only knows that they are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

from penstock.build.options import SpecialText
from penstock.build.recipe import Recipe
from penstock.chat.conversation import Conversation
from penstock.chat.plain_rows import PlainRows, Weights
from penstock.chat.rows import Normaliser as RowReader
from penstock.chat.shapes import Draft
from penstock.chat.special_text import SpecialTextFinder
from penstock.errors import RowError
from penstock.sources import Rows

BATCH_ROWS = 4096
BATCH_BYTES = 4 << 20


@dataclass(slots=True)
class SliceState:
    """What a slice collects on its way."""

    rows: Sequence[bytes]
    rejected: dict[int, dict[str, Any]] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    stencil: Counter[str] = field(default_factory=Counter)
    render: Counter[str] = field(default_factory=Counter)
    encode: Counter[str] = field(default_factory=Counter)

    def reject(self, row: int, error: RowError) -> None:
        known = {"row": row, "kind": error.kind, "reason": error.reason, "remedy": error.remedy}
        self.rejected.setdefault(row, known)


@dataclass(slots=True)
class Batch:
    """Rows on their way: conversations with the number of their row and their side."""

    start: int  # the first row
    conversations: list[Conversation | None] = field(default_factory=list)  # None: plain, and in the draft
    rows: list[int] = field(default_factory=list)
    sides: list[int] = field(default_factory=list)
    draft: Draft | None = None  # for stencils to fill in
    weights: dict[int, Weights] = field(default_factory=dict)  # of plain conversations that give some, by their number

    def add(self, number: int, conversations: Sequence[Conversation]) -> None:
        """Add the conversations of one row, by its number among those of the batch."""
        self.conversations += conversations
        self.rows += repeat(self.start + number, len(conversations))
        self.sides += range(len(conversations))

    def add_plain(self, numbers: range, weights: Mapping[int, Weights]) -> None:
        """Add rows that are in the draft."""
        if weights:
            first = len(self.conversations) - numbers.start
            self.weights |= {first + number: weights[number] for number in numbers if number in weights}
        self.conversations += repeat(None, len(numbers))
        self.rows += range(self.start + numbers.start, self.start + numbers.stop)
        self.sides += repeat(0, len(numbers))

    def taken(self, members: Sequence[int]) -> list[Conversation]:
        """Some of the conversations, none of which is plain."""
        return [c for k in members if (c := self.conversations[k]) is not None]


class Drafting(NamedTuple):
    """What decodes usual rows, and new drafts to take them."""

    plain: PlainRows
    draft: Callable[[], Draft]


class Reading:
    """Reads rows as a recipe says. Without `drafting`, all rows are read into conversations."""

    def __init__(self, recipe: Recipe, special_tokens: Iterable[str], drafting: Drafting | None) -> None:
        self.reader = RowReader(recipe.mapping)
        self._recipe = recipe
        self._special_text = SpecialTextFinder(special_tokens)
        self._drafting = drafting
        self._has_template = bool(recipe.templates)

    def batches(self, rows: Rows, state: SliceState) -> Iterator[Batch]:
        """All rows of a slice, as many at a time as make a batch."""
        for stretch in _stretches(rows.rows):
            batch = self._read(rows, stretch, state)
            if batch.rows:
                yield batch

    def _read(self, rows: Rows, stretch: range, state: SliceState) -> Batch:
        """The conversations of a stretch of rows; those that can't be read are rejected."""
        own = rows.rows[stretch.start : stretch.stop]
        special, escaped = self._special_text.find(own)
        batch = Batch(stretch.start)
        weights: dict[int, Weights] = {}
        if self._drafting is not None:
            batch.draft = self._drafting.draft()
            weights = self._drafting.plain.read(own, escaped, special, batch.draft)
        plain = batch.draft.rows if batch.draft is not None else ()
        at = 0
        for number in sorted(set(range(len(own))).difference(plain)):
            batch.add_plain(range(at, number), weights)
            at = number + 1
            try:
                found = self._conversations(stretch.start + number, own[number], rows)
                if number in special:
                    self._meet_special(special[number], state)
            except RowError as error:
                state.reject(stretch.start + number, error)
                continue
            batch.add(number, found)
        batch.add_plain(range(at, len(own)), weights)
        return batch

    def _conversations(self, number: int, row: bytes, rows: Rows) -> tuple[Conversation, ...]:
        if number in rows.oversize:
            raise _too_large(rows.oversize[number], self._recipe.max_row_bytes)
        conversations = self.reader.conversations(row)
        if not self._has_template and any(conversation.pieces is None for conversation in conversations):
            raise _no_template()
        return conversations

    def _meet_special(self, token: str, state: SliceState) -> None:
        """A row's text has a special token."""
        if self._recipe.special_tokens_in_text is SpecialText.REJECT:
            raise _special_text(token)
        state.notes["special tokens in text"] += 1


def _stretches(rows: Sequence[bytes]) -> Iterator[range]:
    """Numbers of consecutive rows, as many as make a batch."""
    first = size = 0
    for number, row in enumerate(rows):
        size += len(row)
        if size >= BATCH_BYTES or number - first >= BATCH_ROWS - 1:
            yield range(first, number + 1)
            first, size = number + 1, 0
    if first < len(rows):
        yield range(first, len(rows))


def _too_large(size: int, limit: int) -> RowError:
    return RowError(
        "row_too_large", f"the row has {size:,} bytes, more than {limit:,}", "Split it, or raise --max-row-bytes"
    )


def _special_text(token: str) -> RowError:
    return RowError(
        "special_tokens_in_text",
        f"a message contains the special token {token!r}",
        "Clean the text, or allow it with --special-tokens-in-text as-template",
    )


def _no_template() -> RowError:
    return RowError(
        "no_template", "the row has messages, and the tokenizer has no chat template", "Give one with --template FILE"
    )
