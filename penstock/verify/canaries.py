"""Canary content: each packed sequence written in token ids of its own band, so that its true extent can be read off.

What positions or masks claim is not trusted: they are what is examined. Lengths stay as they are; the content is
replaced just before the sequences are packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WIDTH = 8  # ids of a band


def band(number: int, length: int, vocabulary: int) -> list[int]:
    """The ids of one sequence: those of its band, over and over."""
    bands = max(2, vocabulary // WIDTH)
    start = (number % bands) * WIDTH
    return [min(start + place % WIDTH, vocabulary - 1) for place in range(length)]


def owners(ids: torch.Tensor) -> torch.Tensor:
    """The number of the sequence that each place of a row belongs to, counted in the row."""
    bands = ids // WIDTH
    changes = torch.zeros_like(bands)
    changes[:, 1:] = bands[:, 1:] != bands[:, :-1]
    return changes.cumsum(dim=1)


class Canaries:
    """Numbers sequences as they are met."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._met = 0
        self.packed = False  # whether sequences were put together by someone we know

    def next(self, length: int) -> list[int]:
        """The content of the next sequence."""
        self._met += 1
        return band(self._met - 1, length, self._vocabulary)

    def rewritten(self, features: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows for a collator, each with content of its own."""
        return [
            {**row, "input_ids": self.next(len(row["input_ids"]))} if "input_ids" in row else row for row in features
        ]


@contextmanager
def in_trl(canaries: Canaries) -> Iterator[None]:
    """Replace the content of what TRL is about to pack."""
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
def in_penstock(canaries: Canaries) -> Iterator[None]:
    """Replace the content of what Penstock's collator is about to pack."""
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
