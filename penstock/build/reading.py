"""What a slice collects on its way through the pipeline, and how its rows are cut into batches."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from penstock.chat.notes import Note
from penstock.encode.encoder import MAX_PIECE_BYTES
from penstock.errors import EncoderPanic, RowError

BATCH_ROWS = 4096
BATCH_BYTES = 4 << 20


@dataclass(slots=True)
class SliceState:
    """What became of the rows so far."""

    rejected: dict[int, dict[str, Any]] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    render: Counter[str] = field(default_factory=Counter)  # why the reference rendered rows
    encode: Counter[str] = field(default_factory=Counter)  # why the reference encoded them
    fresh: list[int] = field(default_factory=list)  # rows that took a path through the template for the first time

    def note(self, found: Iterable[tuple[int, Note]]) -> None:
        """Count rows with something to be noted, each once."""
        self.notes.update(note.value for _, note in set(found))

    def reject(self, row: int, error: RowError) -> None:
        known = {"row": row, "kind": error.kind, "reason": error.reason, "remedy": error.remedy}
        self.rejected.setdefault(row, known)


def stretches(rows: Sequence[bytes]) -> Iterator[range]:
    """Numbers of consecutive rows, as many as make a batch."""
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
        "Clean the text, or allow it with --special-tokens-in-text as-template",
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
