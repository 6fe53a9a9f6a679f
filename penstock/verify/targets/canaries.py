"""Canaries: packed sequences rewritten in token ids of their own band, so that boundaries can be read from content.

Positions and masks are what is under test, so they can't be used to find the boundaries. Content is replaced just
before sequences are packed; lengths don't change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WIDTH = 8  # ids in a band


def band(number: int, length: int, vocabulary: int) -> list[int]:
    """Token ids for one sequence: those of its band, repeated to `length`."""
    bands = max(2, vocabulary // WIDTH)
    start = (number % bands) * WIDTH
    return [min(start + place % WIDTH, vocabulary - 1) for place in range(length)]


def sequence_numbers(ids: torch.Tensor) -> torch.Tensor:
    """The number, within its row, of the sequence that each position belongs to."""
    bands = ids // WIDTH
    changes = torch.zeros_like(bands)
    changes[:, 1:] = bands[:, 1:] != bands[:, :-1]
    return changes.cumsum(dim=1)


class Canaries:
    """Numbers sequences in the order they are packed."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._count = 0
        self.packed = False  # whether a packer that we patched has run

    def next(self, length: int) -> list[int]:
        """Token ids for the next sequence."""
        self._count += 1
        return band(self._count - 1, length, self._vocabulary)

    def rewrite(self, features: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Replaces the token ids of each row, for a collator that packs."""
        return [
            {**row, "input_ids": self.next(len(row["input_ids"]))} if "input_ids" in row else row for row in features
        ]


@contextmanager
def patch_trl(canaries: Canaries) -> Iterator[None]:
    """Replaces the content of sequences that TRL packs."""
    import trl.trainer.sft_trainer as module

    sft_trainer: Any = module
    plain = sft_trainer.pack_dataset

    def pack(dataset: Any, *args: Any, **kwargs: Any) -> Any:
        canaries.packed = True
        rows = dataset.map(
            lambda row: {"input_ids": canaries.next(len(row["input_ids"]))},
            new_fingerprint=f"canaries{id(canaries)}",
            keep_in_memory=True,
        )
        return plain(rows, *args, **kwargs)

    sft_trainer.pack_dataset = pack
    try:
        yield
    finally:
        sft_trainer.pack_dataset = plain


@contextmanager
def patch_penstock(canaries: Canaries) -> Iterator[None]:
    """Replaces the content of sequences that Penstock's collator packs."""
    import numpy as np

    import penstock.feed.assemble as module

    assemble: Any = module
    plain = assemble.packed

    def pack(found: Any, *args: Any, **kwargs: Any) -> Any:
        canaries.packed = True
        ids = [token for length in found.lengths for token in canaries.next(int(length))]
        return plain(found._replace(ids=np.array(ids, dtype=found.ids.dtype)), *args, **kwargs)

    assemble.packed = pack
    try:
        yield
    finally:
        assemble.packed = plain
