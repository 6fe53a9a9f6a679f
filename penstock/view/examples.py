"""What a view reads: the interface between `store` and everything to its right.

A dataset in the cache satisfies `Examples`, and so does `memory.MemoryExamples`. Nothing is read through it
but the columns of one shard at a time, so that a view costs memory for its index alone.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.store.columns import Columns


class Place(NamedTuple):
    """Where an example comes from: the ordinal of its source in the call, and the row's number there."""

    source: int
    row: int

    def __str__(self) -> str:
        return f"row {self.row} of source {self.source}"


class Examples(Protocol):
    """A prepared dataset. Examples are numbered over all shards in order; of preference data, pairs are."""

    @property
    def key(self) -> str:
        """The content key."""
        ...

    @property
    def tokenizer_digest(self) -> str:
        """Tells whether two datasets have the same vocabulary."""
        ...

    @property
    def is_preference(self) -> bool:
        """Whether examples come in pairs (chosen, rejected)."""
        ...

    @property
    def shard_examples(self) -> npt.NDArray[np.int64]:
        """Token sequences per shard (a pair counts as two), in order."""
        ...

    def columns(self, shard: int) -> Columns:
        """The columns of one shard."""
        ...

    def locate(self, number: int) -> tuple[int, int]:
        """The source and the row that example (or pair) `number` comes from."""
        ...

    def __len__(self) -> int:
        """How many examples, or pairs, there are."""
        ...
