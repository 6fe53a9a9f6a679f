"""The error for a view without examples: names the options that dropped its rows, and how many each dropped."""

from __future__ import annotations

from penstock.errors import ViewError
from penstock.view.ledger import Ledger, Reason
from penstock.view.settings import HoldoutPart, ViewSettings


def empty_view(ledger: Ledger, settings: ViewSettings) -> ViewError:
    """The error for a view that serves no examples."""
    if not ledger.rows:
        return ViewError(_no_rows(ledger.other_part, settings))
    parts = "; ".join(_explained(reason, count, settings) for reason, count in ledger.dropped_rows.items())
    part = " that are held out" if settings.part is HoldoutPart.HELD_OUT else ""
    return ViewError(f"the view has no examples: it leaves out all {ledger.rows:,} rows{part}. {parts}.")


def _no_rows(others: int, settings: ViewSettings) -> str:
    if not others:
        return "the view has no examples because the dataset has none. Its build ledger says why rows were rejected."
    if settings.part is HoldoutPart.HELD_OUT:
        return (
            f"the hold-out is empty: holdout={settings.holdout} holds out none of {others:,} rows. "
            "Hold out a larger fraction, or a number of rows (holdout=1)."
        )
    return (
        f"nothing is left to train on: holdout={settings.holdout} holds out all {others:,} rows. "
        "Hold out a smaller fraction, or a number of rows (holdout=1)."
    )


def _explained(reason: str, count: int, settings: ViewSettings) -> str:
    match Reason(reason):
        case Reason.OVERLONG:
            return (
                f"{count:,} are longer than max_length={settings.max_length} (overlong={settings.overlong.value!r}): "
                "raise max_length, or use 'truncate'"
            )
        case Reason.REGIONS_UNKNOWN:
            return (
                f"{count:,} have unknown regions (regions_unknown={settings.regions_unknown.value!r}): "
                "use another template, or train_on='all_tokens'"
            )
        case Reason.NO_TRAINED_TOKEN | Reason.CHUNK_WITHOUT_TRAINED_TOKEN:
            limit = f" within max_length={settings.max_length}" if settings.max_length is not None else ""
            remedy = "raise it, or use overlong='truncate_left'" if limit else "use another train_on"
            return f"{count:,} have no token that train_on={settings.train_on.value!r} trains{limit}: {remedy}"
