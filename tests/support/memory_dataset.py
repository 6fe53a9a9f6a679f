"""A dataset in memory, built from rows given as lists of `Piece`, for tests of views without a cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Unpack

import numpy as np
import orjson
from blake3 import blake3

from penstock.arguments import ViewArguments
from penstock.arrays import Int64
from penstock.errors import StoreError
from penstock.load.options import view_options
from penstock.load.view import View
from penstock.prepare.chat.conversation import Part, Role
from penstock.prepare.encode.columns import Columns
from penstock.store.dataset import Dataset, RowLocation, Shards
from penstock.store.manifest import BuildLedger

SMALL_IDS = 100  # in the vocabulary of every dataset


class Piece(NamedTuple):
    """A run of tokens with one origin."""

    message: int
    role: Role
    part: Part
    ids: tuple[int, ...]
    weight: float | None = None


Row = Sequence[Piece]


class MemoryShards(Shards):
    """Columns in memory."""

    def __init__(self, shards: tuple[Columns, ...]) -> None:
        self._held = shards

    @property
    def examples(self) -> Int64:
        return np.array([shard.examples for shard in self._held], np.int64)

    @property
    def total(self) -> int:
        return int(self.examples.sum())

    def columns(self, shard: int) -> Columns:
        return self._held[shard]

    structure = read = columns
    download_bytes = 0

    @property
    def bytes(self) -> list[int]:
        return [shard.ids.nbytes for shard in self._held]

    def fetch(self, shards: Iterable[int]) -> None:
        """Nothing to do."""

    def __len__(self) -> int:
        return len(self._held)


class MemoryDataset(Dataset):
    """A dataset of given rows: single examples, or alternating chosen and rejected sides."""

    shards: MemoryShards

    def __init__(self, shards: tuple[Columns, ...], key: str, is_preference: bool = False, tokenizer: str = "") -> None:
        self._arguments = shards, key, is_preference, tokenizer
        self.shards = MemoryShards(shards)

    @classmethod
    def of(cls, rows: Sequence[Row], *, shard_rows: int = 1000, pairs: bool = False) -> MemoryDataset:
        """Cut rows into shards of `shard_rows` sequences (an even number of them for pairs)."""
        cuts = range(0, max(len(rows), 1), shard_rows)
        shards = tuple(_columns(rows[cut : cut + shard_rows], cut, pairs) for cut in cuts)
        content = blake3(repr([list(map(tuple, row)) for row in rows]).encode()).hexdigest()
        return cls(shards, f"b3-{content}", pairs)

    @property
    def key(self) -> str:
        return self._arguments[1]

    @property
    def tokens(self) -> int:
        return self.ledger.tokens

    @property
    def is_preference(self) -> bool:
        return self._arguments[2]

    @property
    def recipe(self) -> Mapping[str, Any]:
        return {"tokenizer": self._arguments[3], "special_tokens": {}, "templates": {}}

    @property
    def cache(self) -> Any:
        raise StoreError("a dataset in memory is in no cache")

    @cache.setter
    def cache(self, value: object) -> None: ...

    @property
    def ledger(self) -> BuildLedger:
        sequences = self.shards.total
        tokens = sum(len(self.shards.columns(shard).ids) for shard in range(len(self.shards)))
        return BuildLedger(len(self), len(self), {}, {}, {}, sequences, tokens, 0, {}, {}, [])

    origins: Mapping[str, Any] = {}

    def locate(self, example: int) -> RowLocation:
        """The row's number in source 0, the only one."""
        return RowLocation(0, example // 2 if self.is_preference else example)

    @cached_property
    def tokenizer_json(self) -> bytes:
        """One token per id, and small ids that only other members of a mixture may use."""
        ids = [self.shards.columns(shard).ids.max(initial=0) for shard in range(len(self.shards))]
        words = {f"<{number}>": number for number in range(max(int(max(ids, default=0)) + 1, SMALL_IDS))}
        model = {"type": "WordLevel", "vocab": words, "unk_token": "<0>"}
        return orjson.dumps({"version": "1.0", "added_tokens": [], "model": model})

    def view(self, **options: Unpack[ViewArguments]) -> View:
        """A view of these examples, scanned, which may be empty."""
        view = View(self, view_options(options))
        _ = view.index
        return view

    def __reduce__(self) -> Any:
        return type(self), self._arguments


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
