"""The batch page: the contents of a step of a plan, how its rows are packed, and how full they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from penstock.errors import UsageError
from penstock.load.example import place_of
from penstock.load.options import PlanOptions
from penstock.look.html import link
from penstock.look.viewer.session import Session

# ---- query -----------------------------------------------------------------------------------------------------------
#
# Validated query strings: unknown names and invalid values are errors that say what is valid.


_DIGITS: Final = 15  # of a number in an address


class Query:
    """Reads parameters by name and kind; `end` rejects parameters that were not read."""

    def __init__(self, given: Mapping[str, str], pairs: Iterable[tuple[str, str]]) -> None:
        names = [name for name, _ in pairs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(f"{twice!r} is given twice")
        self._given = given
        self._read: set[str] = set()

    def text(self, name: str, default: str = "") -> str:
        """Any text."""
        self._read.add(name)
        return self._given.get(name, default)

    def choice(self, name: str, known: Iterable[str], default: str = "") -> str:
        """One of a few words."""
        value, known = self.text(name, default), list(known)
        if value and value not in known:
            raise UsageError(f"{name}={value!r} is unknown. Use one of: {', '.join(filter(None, known))}.")
        return value

    def number(self, name: str, low: int = 0, high: int = 10**_DIGITS) -> int | None:
        """A whole number, or None if it is missing."""
        value = self.text(name)
        if not value:
            return None
        if not (value.isascii() and value.isdigit() and len(value) <= _DIGITS) or not low <= int(value) <= high:
            raise UsageError(f"{name}={value!r} is not a number from {low:,} to {high:,}")
        return int(value)

    def end(self) -> None:
        """Reject parameters that this page doesn't have."""
        for name in self._given:
            if name not in self._read:
                known = ", ".join(sorted(self._read)) or "none"
                raise UsageError(f"{name!r} is not a parameter of this page. Parameters: {known}.")


# ---- batches ---------------------------------------------------------------------------------------------------------


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
    plan = session.plan(PlanOptions(batch_size, capacity if collate == "packed" else None, seed=seed))
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
            row = int(view.index.rows[item])
            name = "{}, row {:,}".format(*session.dataset.file_row(*place_of(session.dataset, row)))
            own.append(PlacedSequence(item, row, name, tokens, before / width, tokens / width))
            before += tokens
        rows.append(BatchRow(own, before, before / width))
        at += count
    return rows
