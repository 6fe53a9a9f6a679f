"""The interface that views need from a dataset.

Datasets in the cache implement `Examples`, and so does `memory.MemoryExamples`. Columns are read one shard at a time,
so a view needs memory only for its index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.store.columns import Columns
from penstock.store.dataset import RowLocation
from penstock.view.settings import LossPolicy


class Examples(Protocol):
    """A prepared dataset. Token sequences are numbered over all shards in order; the sides of a pair are adjacent."""

    @property
    def key(self) -> str:
        """The content key."""
        ...

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Every input that determines the tokens. Datasets with equal `recipe["tokenizer"]` share a vocabulary."""
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

    def structure(self, shard: int, /) -> Columns:
        """The columns of one shard, perhaps without `ids`, which need not be read to scan single examples."""
        ...

    def fetch(self, shards: Iterable[int], /) -> None:
        """Download shards that are not on this machine, many at a time."""
        ...

    def shard_bytes(self, shard: int, /) -> int:
        """The size of a shard's file."""
        ...

    @property
    def download_bytes(self) -> int:
        """Bytes of shards to download ahead of their use; 0 if all shards are on this machine."""
        ...

    def locate(self, example: int, /) -> RowLocation:
        """The source and row of a token sequence."""
        ...

    def __len__(self) -> int:
        """The number of rows: examples, or pairs."""
        ...


def is_labelled(examples: Examples) -> bool:
    """Whether each answer has a KTO label (`Columns.desirable`)."""
    mapping = examples.recipe.get("mapping") or {}
    return bool(mapping.get("format") == "kto")


def default_policy(examples: Examples) -> LossPolicy:
    """What a view trains unless told: the rows' own mask of adopted data, the labelled answer of KTO data."""
    if examples.recipe.get("adopted"):
        return LossPolicy.CUSTOMIZED
    return LossPolicy.LAST_ASSISTANT_MESSAGE if is_labelled(examples) else LossPolicy.ALL_ASSISTANT_MESSAGES


def place_of(examples: Examples, row: int) -> RowLocation:
    """The source and row that a row of the dataset (an example or a pair) comes from."""
    return examples.locate(2 * row if examples.is_preference else row)


def named(place: RowLocation) -> str:
    """A row location as text for error messages."""
    return f"row {place.row} of source {place.source}"
