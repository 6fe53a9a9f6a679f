"""Small views for tests of the feed, and a way to compare batches byte by byte."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from penstock.arguments import ViewArguments
from penstock.load.collate import Batch
from penstock.load.view import Mixture, View, mix
from penstock.prepare.chat.conversation import Role
from tests.support.memory_dataset import MemoryDataset, Piece
from tests.support.view_rows import chat


def rows(count: int, seed: int = 0) -> list[list[Piece]]:
    """Conversations of 8 to 60 tokens with distinct ids."""
    rng = np.random.default_rng(seed)
    return [
        chat(
            (Role.USER, int(rng.integers(1, 20))),
            (Role.ASSISTANT, int(rng.integers(1, 20))),
            (Role.USER, int(rng.integers(1, 5))),
            (Role.ASSISTANT, int(rng.integers(1, 5))),
            first_id=1 + 100 * number,
            weights={1: 0.5} if number % 3 == 0 else None,
        )
        for number in range(count)
    ]


def view(count: int = 37, seed: int = 0, **options: Any) -> View:
    """A view in several shards."""
    chosen: ViewArguments = {"max_length": 64, **options}
    return MemoryDataset.of(rows(count, seed), shard_rows=10).view(**chosen)


def pair_view(count: int = 11, **options: Any) -> View:
    """Preference data whose pairs share their first message."""
    rng = np.random.default_rng(1)
    sides = []
    for number in range(count):
        prompt = (Role.USER, int(rng.integers(1, 9)))
        first = chat(prompt, (Role.ASSISTANT, int(rng.integers(1, 9))), first_id=1000 * number)
        second = chat(prompt, (Role.ASSISTANT, int(rng.integers(1, 9))), first_id=1000 * number)
        body = second[2]
        second[2] = body._replace(ids=tuple(token + 500 for token in body.ids))
        sides += [first, second]
    return MemoryDataset.of(sides, shard_rows=6, pairs=True).view(**{"max_length": 16, **options})


def mixture() -> Mixture:
    """Two views with different policies and a fraction."""
    left = view(20, seed=2)
    right = MemoryDataset.of(rows(15, seed=3), shard_rows=4).view(max_length=40, train_on="all_tokens")
    return mix({"left": (left, 1.0), "right": (right, 0.6)}, seed=9)


def plain(batch: Batch) -> dict[str, Any]:
    """All fields of a batch, as bytes and plain values."""
    tensors = {
        name: tensor if isinstance(tensor, int) else (str(tensor.dtype), tensor.shape, np.asarray(tensor).tobytes())
        for name, tensor in batch.tensors.items()
    }
    return {
        "where": (batch.step, batch.epoch, batch.micro, batch.micros),
        "rows": batch.rows,
        "items": batch.items.tolist(),
        "counts": batch.counts,
        **tensors,
    }


def plains(batches: Iterable[Batch]) -> list[dict[str, Any]]:
    """All batches of a run, plain."""
    return [plain(batch) for batch in batches]
