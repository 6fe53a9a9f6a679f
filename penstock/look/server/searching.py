"""Text search over all rows, shard by shard: one vectorised gather turns ids into bytes, which are then scanned.

Case is ignored for ASCII letters; other characters are compared exactly. A shard of a million tokens takes about 50 ms
and is mapped only while it is read, so memory stays flat. Hits are yielded as they are found; callers can stop at any
time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.arrays import Bool, Int64
from penstock.look.survey import columns_of
from penstock.look.visible import visible_text
from penstock.store.columns import Columns
from penstock.store.dataset import StoredDataset

_AROUND: Final = 60  # bytes shown before and after a hit


class Hit(NamedTuple):
    """The first match in a row."""

    row: int
    before: str
    match: str
    after: str


class Scanned(NamedTuple):
    """The hits in one shard; `rows` is the number of rows scanned so far."""

    rows: int
    hits: list[Hit]


class Searcher:
    """Searches one dataset."""

    def __init__(self, dataset: StoredDataset) -> None:
        self._dataset = dataset
        self._sides = 2 if dataset.is_preference else 1
        self._bounds = np.concatenate(([0], np.cumsum(dataset.shard_examples // self._sides)))

    def scan(self, text: str, first: int = 0, among: Bool | None = None) -> Iterator[Scanned]:
        """Yield hits from row `first` onwards, shard by shard; `among` restricts the rows."""
        needle = _lower(text.encode())
        for shard in range(int(np.searchsorted(self._bounds, first, side="right")) - 1, len(self._dataset.shards)):
            start, end = int(self._bounds[shard]), int(self._bounds[shard + 1])
            if among is not None and not among[start:end].any():
                yield Scanned(end, [])
                continue
            columns = columns_of(self._dataset, shard)
            hits = [
                hit
                for hit in self._hits(columns, needle, start)
                if hit.row >= first and (among is None or among[hit.row])
            ]
            yield Scanned(end, hits)

    def _hits(self, columns: Columns, needle: bytes, before: int) -> Iterator[Hit]:
        """One hit per row; a match never spans two sequences."""
        data, ends = self._decoded(columns, self._lower)
        rows = ends[columns.id_offsets[1:].astype(np.int64)]  # where each sequence ends, in bytes
        last, shown = -1, list[tuple[int, int]]()
        for match in re.finditer(re.escape(needle), data):
            sequence = int(np.searchsorted(rows, match.start(), side="right"))
            row = sequence // self._sides
            if row != last and match.end() <= rows[sequence]:
                last = row
                shown.append((match.start(), sequence))
        if not shown:
            return
        original, _ = self._decoded(columns, self._plain)
        for at, sequence in shown:
            start, end = int(rows[sequence - 1]) if sequence else 0, int(rows[sequence])
            yield Hit(
                before + sequence // self._sides,
                _clipped(original[max(start, at - _AROUND) : at], max(start, at - _AROUND) > start, left=True),
                visible_text(original[at : at + len(needle)]),
                _clipped(original[at + len(needle) : min(end, at + len(needle) + _AROUND)], False, left=False),
            )

    def _decoded(self, columns: Columns, table: pa.Array) -> tuple[bytes, Int64]:
        """The text of a shard, and the start of each token in it."""
        ids = np.ascontiguousarray(columns.ids)
        taken = table.take(pa.Array.from_buffers(pa.from_numpy_dtype(ids.dtype), len(ids), [None, pa.py_buffer(ids)]))
        _, offsets, data = taken.buffers()
        ends = np.frombuffer(offsets, np.int64, len(ids) + 1)
        return (b"" if data is None else data.to_pybytes()), ends

    @cached_property
    def _plain(self) -> pa.Array:
        return _table(self._dataset.vocabulary.token_bytes)

    @cached_property
    def _lower(self) -> pa.Array:
        return _table([_lower(token) for token in self._dataset.vocabulary.token_bytes])


def _lower(text: bytes) -> bytes:
    """Lower-case ASCII letters; everything else, and the length, is unchanged."""
    return text.lower()


def _table(tokens: list[bytes]) -> pa.Array:
    """Tokens as an Arrow array, made from its buffers: `pa.array` would import pandas."""
    offsets = np.concatenate(([0], np.cumsum(np.fromiter(map(len, tokens), np.int64, len(tokens)))))
    data = pa.py_buffer(b"".join(tokens))
    return pa.Array.from_buffers(pa.large_binary(), len(tokens), [None, pa.py_buffer(offsets), data])


def _clipped(text: bytes, cut: bool, *, left: bool) -> str:
    """The text around a hit, without partial characters at its edges."""
    while left and cut and text and text[0] & 0xC0 == 0x80:
        text = text[1:]
    if not left:
        text = text.decode("utf-8", "ignore").encode()
    return ("… " if cut else "") + visible_text(text).replace("\n", " ")
