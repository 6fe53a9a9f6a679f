"""The ledgers as a flow chart, from source rows to trained tokens, with the losses at each step.

The steps of a stage add up: input equals losses plus what is passed on. The last step is the trained tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.look.stats import Stats
from penstock.view.ledger import Reason

_TOLD = {
    Reason.REGIONS_UNKNOWN: "regions not certain",
    Reason.OVERLONG: "longer than max_length",
    Reason.NO_TRAINED_TOKEN: "nothing trained",
    Reason.CHUNK_WITHOUT_TRAINED_TOKEN: "chunk with nothing trained",
}


class Step(NamedTuple):
    """A bar of the flow: `amount` of `whole`, starting at `before`. Totals start and end a stage."""

    kind: str  # total, lost, masked, trained
    label: str
    amount: int
    before: int
    whole: int


class Stage(NamedTuple):
    """Rows, or tokens."""

    unit: str
    steps: tuple[Step, ...]


Lost = tuple[str, str, int]  # kind, label, count


def flow(stats: Stats) -> list[Stage]:
    """Rows from the sources to the view, then tokens from the view's rows to the trained ones."""
    ledger = stats.ledger
    prepared = ledger.rows + ledger.other_part
    not_served = [("lost", f"not served: {_label(reason)}", count) for reason, count in ledger.dropped_rows.items()]
    if ledger.other_part:
        not_served.insert(0, ("lost", "on the other side of the hold-out", ledger.other_part))
    rows = [("rows prepared", not_served)]
    whole = prepared
    if stats.build:
        whole = stats.build["rows"]
        rejected = [("lost", f"rejected: {kind}", count) for kind, count in stats.build["rejected"].items()]
        rows.insert(0, ("rows in the sources", rejected))
    gone = [("lost", f"not served: {_label(reason)}", count) for reason, count in ledger.dropped_tokens.items()]
    if ledger.truncated:
        gone.append(("lost", "cut by max_length", ledger.truncated))
    gone.append(("masked", "masked: read, not trained", ledger.masked))
    return [
        Stage("rows", _steps(rows, whole, "total", "rows served")),
        Stage("tokens", _steps([("tokens of the prepared rows", gone)], ledger.tokens, "trained", "tokens trained")),
    ]


def _steps(parts: list[tuple[str, list[Lost]]], whole: int, last: str, label: str) -> tuple[Step, ...]:
    """A total before each part, the losses in the part, and the final total."""
    steps, left = list[Step](), whole
    for total, lost in parts:
        steps.append(Step("total", total, left, 0, whole))
        for kind, text, count in lost:
            left -= count
            steps.append(Step(kind, text, count, left, whole))
    return (*steps, Step(last, label, left, 0, whole))


def _label(reason: str) -> str:
    return _TOLD[Reason(reason)] if reason in set(Reason) else reason
