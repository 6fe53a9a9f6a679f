"""A dataset in memory, for tests and for trying out views without a cache.

`MemoryExamples` is built from rows given as lists of `Piece`. It implements `Examples` and can be pickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import numpy as np
from blake3 import blake3

from penstock.arguments import ViewArguments
from penstock.arrays import Int64
from penstock.load.options import view_options
from penstock.load.view import BaseView
from penstock.prepare.chat.conversation import Part, Role
from penstock.prepare.encode.columns import Columns
from penstock.store.dataset import RowLocation


class Piece(NamedTuple):
    """A run of tokens with one origin."""

    message: int
    role: Role
    part: Part
    ids: tuple[int, ...]
    weight: float | None = None


Row = Sequence[Piece]


@dataclass(frozen=True, eq=False)
class MemoryExamples:
    """Rows stored as columns: single examples, or alternating chosen and rejected sides."""

    shards: tuple[Columns, ...]
    key: str
    is_preference: bool = False
    tokenizer: str = "memory"

    @classmethod
    def of(cls, rows: Sequence[Row], *, shard_rows: int = 1000, pairs: bool = False) -> MemoryExamples:
        """Cut rows into shards of `shard_rows` sequences (an even number of them for pairs)."""
        cuts = range(0, max(len(rows), 1), shard_rows)
        shards = tuple(_columns(rows[cut : cut + shard_rows], cut, pairs) for cut in cuts)
        content = blake3(repr([list(map(tuple, row)) for row in rows]).encode()).hexdigest()
        return cls(shards, f"b3-{content}", pairs)

    @property
    def shard_examples(self) -> Int64:
        """Token sequences per shard."""
        return np.array([shard.examples for shard in self.shards], np.int64)

    def columns(self, shard: int) -> Columns:
        """The columns of one shard."""
        return self.shards[shard]

    structure = columns
    download_bytes = 0

    def fetch(self, shards: Iterable[int]) -> None:
        """Nothing to do."""

    def shard_bytes(self, shard: int) -> int:
        """The size of the tokens."""
        return self.shards[shard].ids.nbytes

    @property
    def recipe(self) -> Mapping[str, Any]:
        """A recipe with just a tokenizer name."""
        return {"tokenizer": self.tokenizer}

    def locate(self, example: int) -> RowLocation:
        """The row's number in source 0, the only one."""
        return RowLocation(0, example // 2 if self.is_preference else example)

    def view(self, **options: Unpack[ViewArguments]) -> BaseView:
        """A view of these examples."""
        return BaseView(self, view_options(options)).scanned()

    def __len__(self) -> int:
        return int(self.shard_examples.sum()) // (2 if self.is_preference else 1)


def _columns(rows: Sequence[Row], before: int, pairs: bool) -> Columns:
    pieces = [piece for row in rows for piece in row]
    weights = np.array([np.nan if piece.weight is None else piece.weight for piece in pieces], np.float32)
    numbers = (np.arange(before, before + len(rows)) // (2 if pairs else 1)).astype(np.uint32)
    hashes = [_row_hash(rows[at - at % 2 : at - at % 2 + 2] if pairs else [rows[at]]) for at in range(len(rows))]
    return Columns(
        ids=np.array([token for piece in pieces for token in piece.ids], np.uint32),
        id_offsets=_offsets(sum(len(piece.ids) for piece in row) for row in rows),
        segment_offsets=_offsets(len(row) for row in rows),
        segment_ends=np.array(
            [end for row in rows for end in np.cumsum([len(piece.ids) for piece in row]).tolist()], np.uint32
        ),
        segment_roles=np.array([piece.role for piece in pieces], np.uint8),
        segment_parts=np.array([piece.part for piece in pieces], np.uint8),
        segment_messages=np.array([piece.message for piece in pieces], np.int32),
        segment_weights=None if np.isnan(weights).all() else weights,
        rows=numbers,
        row_hashes=np.array(hashes, np.uint64),
        sides=np.tile(np.array([0, 1], np.uint8), len(rows) // 2) if pairs else None,
    )


def _row_hash(row: Sequence[Row]) -> int:
    return int.from_bytes(blake3(repr([list(map(tuple, side)) for side in row]).encode()).digest(8), "little")


def _offsets(counts: Iterable[int]) -> Int64:
    return np.concatenate(([0], np.cumsum(list(counts), dtype=np.int64)))
