"""State of a slice in the pipeline (rejected rows, notes, engine counts), and how its rows are split into batches."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from penstock.arrays import Int64
from penstock.errors import EncoderPanic, RowError
from penstock.prepare.chat.notes import Note, NotedRows, joined_notes
from penstock.prepare.encode.encoder import MAX_PIECE_BYTES

BATCH_ROWS = 4096
BATCH_BYTES = 4 << 20


@dataclass(slots=True)
class SliceState:
    """Rejections, notes and engine counts of the rows so far."""

    rejected: dict[int, dict[str, Any]] = field(default_factory=dict)
    noted: dict[Note, list[Int64]] = field(default_factory=dict)  # numbers of rows, not yet sorted
    render: Counter[str] = field(default_factory=Counter)  # why the reference rendered rows
    encode: Counter[str] = field(default_factory=Counter)  # why the reference encoded them
    fresh: list[int] = field(default_factory=list)  # rows that took a path through the template for the first time

    def note(self, found: Iterable[tuple[int, Note]]) -> None:
        """Adds notes, given as pairs of row and note."""
        rows: dict[Note, list[int]] = {}
        for row, note in found:
            rows.setdefault(note, []).append(row)
        for note, own in rows.items():
            self.noted.setdefault(note, []).append(np.array(own, np.int64))

    def note_rows(self, found: NotedRows, rows: Int64) -> None:
        """Adds the notes of a batch; `rows` are the slice's numbers of the batch's rows."""
        for note, numbers in found.items():
            self.noted.setdefault(note, []).append(rows[numbers])

    @property
    def notes(self) -> NotedRows:
        """The noted rows that were not rejected."""
        refused = np.fromiter(self.rejected, np.int64, len(self.rejected))
        kept = joined_notes(*({note: np.concatenate(rows)} for note, rows in self.noted.items()))
        return {note: remaining for note, rows in kept.items() if len(remaining := np.setdiff1d(rows, refused))}

    def reject(self, row: int, error: RowError) -> None:
        known = {"row": row, "kind": error.kind, "reason": error.reason, "remedy": error.remedy}
        self.rejected.setdefault(row, known)


def batch_ranges(rows: Sequence[bytes]) -> Iterator[range]:
    """Yields the ranges of row numbers that form batches."""
    ends = [0, *accumulate(map(len, rows))]
    first = 0
    while first < len(rows):
        enough = bisect_left(ends, ends[first] + BATCH_BYTES, first + 1)
        stop = min(enough, first + BATCH_ROWS, len(rows))
        yield range(first, stop)
        first = stop


def too_large(size: int, limit: int) -> RowError:
    return RowError(
        "row_too_large", f"the row has {size:,} bytes, more than {limit:,}", "Split it, or raise --max-row-bytes"
    )


def special_text(token: str) -> RowError:
    return RowError(
        "special_tokens_in_text",
        f"a message contains the special token {token!r}",
        "Clean the text, or allow it with --special-tokens-in-text as_template",
    )


def no_template() -> RowError:
    return RowError(
        "no_template", "the row has messages, and the tokenizer has no chat template", "Give one with --template FILE"
    )


def unbroken(size: int) -> RowError:
    return RowError(
        "unbroken_text",
        f"{size:,} bytes of the text have no place where the tokenizer can be given a part of it, "
        f"such as a space after a letter; at most {MAX_PIECE_BYTES:,} are served",
        "Split the row, or remove what is not language",
    )


def encoder_panic(error: EncoderPanic) -> RowError:
    return RowError("encoder_panic", str(error), "Remove the row, or report it to the tokenizer's makers")
