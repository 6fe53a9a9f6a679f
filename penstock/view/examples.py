"""What a view reads: the interface between `store` and everything to its right.

A dataset in the cache satisfies `Examples`, and so does `memory.MemoryExamples`. Nothing is read through it
but the columns of one shard at a time, so that a view costs memory for its index alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.store.columns import Columns
from penstock.store.dataset import RowLocation


class Examples(Protocol):
    """A prepared dataset. Token sequences are numbered over all shards in order; the sides of a pair are adjacent."""

    @property
    def key(self) -> str:
        """The content key."""
        ...

    @property
    def recipe(self) -> Mapping[str, Any]:
        """All that decided the tokens; `recipe["tokenizer"]` tells whether two datasets share a vocabulary."""
        ...

    @property
    def is_preference(self) -> bool:
        """Whether examples come in pairs (chosen, rejected)."""
        ...

    @property
    def shard_examples(self) -> npt.NDArray[np.int64]:
        """Token sequences per shard (a pair counts as two), in order."""
        ...

    def columns(self, shard: int, /) -> Columns:
        """The columns of one shard."""
        ...

    def locate(self, example: int, /) -> RowLocation:
        """Where a token sequence comes from."""
        ...

    def __len__(self) -> int:
        """How many rows there are: examples, or pairs."""
        ...


def is_labelled(examples: Examples) -> bool:
    """Whether each answer is labelled as desirable or not (KTO), by `Columns.desirable`."""
    mapping = examples.recipe.get("mapping") or {}
    return bool(mapping.get("format") == "kto")


def place_of(examples: Examples, row: int) -> RowLocation:
    """Where a row of the dataset (an example, or a pair) comes from."""
    return examples.locate(2 * row if examples.is_preference else row)


def named(place: RowLocation) -> str:
    """A place as error messages say it."""
    return f"row {place.row} of source {place.source}"
