"""The record of one slice, from which its ledger, the JSON beside its shard and its report are made.

`SliceState` collects rejections, notes and engine counts while rows pass the stages; `SliceRecord` is the result.
"""

from __future__ import annotations

import base64
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from penstock.arrays import Int64
from penstock.errors import EncoderPanic, RowError
from penstock.prepare.chat.conversation import Part
from penstock.prepare.chat.notes import Note, NotedRows
from penstock.prepare.encode.columns import Columns
from penstock.prepare.encode.encoder import MAX_PIECE_BYTES

BATCH_ROWS = 4096
BATCH_BYTES = 4 << 20


@dataclass(frozen=True)
class SliceRecord:
    """A prepared slice: its examples, and all that is stored and reported about it."""

    columns: Columns
    rejected: list[dict[str, Any]]  # row (in the slice), kind, reason, remedy, data
    noted: NotedRows  # of the rows that were kept
    nulls_dropped: int  # fields that Arrow added
    rows: int
    bytes: int  # of all rows
    crossings: dict[str, int]  # tokens across borders in answers, by border
    engines: dict[str, Counter[str]]  # stage -> why the reference engine was used -> rows
    encoder: tuple[str, str]  # the encoding engine, and why no faster one is used
    paths: int  # through the branches of the templates, taken so far
    warnings: list[str]  # about the templates
    fresh: list[int]  # rows that took a path through the template for the first time
    cut: set[tuple[int, int]]  # row and side of examples of which only the beginning was encoded
    checked: int = 0  # rows compared with the references
    mismatches: int = 0  # those that differed; all rows of the slice were then redone with the references

    @cached_property
    def ledger(self) -> dict[str, Any]:
        """The counts that the shard stores. Every row is kept or rejected."""
        columns = self.columns
        only = columns.segment_offsets[:-1][np.diff(columns.segment_offsets) == 1]
        notes = {note.value: len(rows) for note, rows in self.noted.items()}
        if self.nulls_dropped:
            notes[Note.ARROW_NULLS.value] = self.nulls_dropped
        return {
            "rows": self.rows,
            "kept": len(np.unique(columns.rows)),
            "rejected": dict(Counter(entry["kind"] for entry in self.rejected)),
            "examples": len(columns.rows),
            "tokens": columns.tokens,
            "regions_unknown": int(np.count_nonzero(columns.segment_parts[only] == Part.GLUE)),
            "crossings": self.crossings,
            "notes": dict(sorted(notes.items())),
            "warnings": self.warnings,
        }


@dataclass(slots=True)
class SliceState:
    """Rejections, notes and engine counts of the rows so far."""

    by_reference: bool = False  # whether only the reference engines are used
    window: int = 0  # encode texts up to the first end of a turn after this many bytes; 0 for whole texts
    rejected: dict[int, dict[str, Any]] = field(default_factory=dict)
    noted: dict[Note, list[Int64]] = field(default_factory=dict)  # numbers of rows, not yet sorted
    render: Counter[str] = field(default_factory=Counter)  # why the reference rendered rows
    encode: Counter[str] = field(default_factory=Counter)  # why the reference encoded them
    fresh: list[int] = field(default_factory=list)
    cut: set[tuple[int, int]] = field(default_factory=set)

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
        noted = self.noted.items()
        return {note: kept for note, rows in noted if len(kept := np.setdiff1d(np.concatenate(rows), refused))}

    def reject(self, row: int, error: RowError) -> None:
        """Rejects a row; the first error counts."""
        known = {"row": row, "kind": error.kind, "reason": error.reason, "remedy": error.remedy}
        self.rejected.setdefault(row, known)


def shown(row: bytes) -> str | dict[str, str]:
    """Returns a rejected row as a JSON value: as text, or as base64 if it isn't UTF-8."""
    try:
        return row.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(row).decode()}


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


def lost_spans() -> RowError:
    return RowError(
        "bad_span",
        "the regions of the row are unknown, so its spans have no place in the text",
        "Use another template, or remove the spans",
    )


def straddled() -> RowError:
    return RowError(
        "straddled_span",
        "a token crosses the border of a marked span",
        "Move the border, or let --straddle inside or touch decide about such tokens",
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
