"""The batch page: the contents of a step of a plan, how its rows are packed, and how full they are."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from penstock.errors import UsageError
from penstock.look.html import link
from penstock.look.server.query import Query
from penstock.look.server.session import Session
from penstock.pack.settings import PlanSettings
from penstock.view.examples import place_of

_BATCH_SIZE: Final = 16
_CAPACITY: Final = 4096
_MOST: Final = 512  # rows of a step on one page


class PlacedSequence(NamedTuple):
    """A sequence (or pair) in a row of the batch."""

    item: int
    row: int
    place: str
    tokens: int
    before: float  # share of the row to its left
    share: float


class BatchRow(NamedTuple):
    """A row of the batch: a bin when packed, else one sequence or pair."""

    placed: list[PlacedSequence]
    tokens: int
    full: float


def batch_page(session: Session, query: Query) -> dict[str, Any]:
    """The page's variables, for the plan in the query string."""
    collate = query.choice("collate", ("packed", "padded"), "padded" if session.dataset.is_preference else "packed")
    batch_size, seed = query.number("batch_size", 1, _MOST) or _BATCH_SIZE, query.number("seed") or 0
    capacity, step = query.number("capacity", 1, 1 << 24), query.number("step") or 0
    query.end()
    if collate == "packed":
        capacity = capacity or session.options.capacity or session.settings.max_length or _fitting(session)
    plan = session.plan(PlanSettings(batch_size, capacity if collate == "packed" else None, seed=seed))
    steps = plan.steps_in(0)
    if step >= 1000 * steps:
        raise UsageError(f"step={step:,}: an epoch has {steps:,} steps")
    taken = plan.at(step)
    rows = _rows(session, taken.items, taken.counts, capacity if collate == "packed" else None)
    asked = {"collate": collate, "batch_size": batch_size, "capacity": capacity, "seed": seed}
    tokens, places = sum(row.tokens for row in rows), sum(row.tokens / row.full for row in rows if row.full)
    return {
        "rows": rows,
        "step": step,
        "epoch": taken.epoch,
        "steps": steps,
        "tokens": tokens,
        "full": tokens / places if places else 0.0,
        "epoch_full": 1 - plan.padding_in(taken.epoch),
        "asked": {**asked, "capacity": capacity if collate == "packed" else None},
        "turn": lambda number: link("/batch", {**asked, "step": number}),
    }


def _fitting(session: Session) -> int:
    """The default capacity, which fits the longest sequence."""
    lengths = session.view().lengths
    longest = int(lengths.max()) if len(lengths) else 1
    return max(_CAPACITY, 1 << (longest - 1).bit_length())


def _rows(session: Session, items: Any, counts: Any, capacity: int | None) -> list[BatchRow]:
    view, at, rows = session.view(), 0, []
    lengths = view.lengths[items].astype(np.int64)
    totals = lengths if lengths.ndim == 1 else lengths.sum(axis=1)
    width = capacity or int(totals.max(initial=1))
    for count in counts.tolist():
        own, before = [], 0
        for item, tokens in zip(items[at : at + count].tolist(), totals[at : at + count].tolist(), strict=True):
            row = int(view.numbers[item])
            place = place_of(session.dataset, row)
            name = f"{session.sources.get(place.source, place.source)}, row {place.row:,}"
            own.append(PlacedSequence(item, row, name, tokens, before / width, tokens / width))
            before += tokens
        rows.append(BatchRow(own, before, before / width))
        at += count
    return rows
