"""Notebook HTML for datasets, views, examples, statistics and batches.

The output is a fragment without scripts, since notebooks remove scripts from untrusted output. Colours are translucent
to suit light and dark themes, and trained text is also underlined. Objects that can't be drawn keep their plain repr.
"""

from __future__ import annotations

from html import escape
from typing import Any, Final

from markupsafe import Markup

from penstock.errors import PenstockError
from penstock.load.collate import Batch
from penstock.load.example import Example, Pair
from penstock.load.view import Member, Mixture, View
from penstock.look.html import render
from penstock.look.statistics import Stats
from penstock.look.tokens import TokenBytes, TokenRun, blocks, safe_bytes, sides_of, token_texts
from penstock.store.dataset import Dataset

_MOST: Final = 1500  # tokens of a sequence
_SHOWN: Final = 3  # sequences of a batch


def html_of(shown: object) -> str | None:
    """The HTML fragment, or None to fall back to the plain repr."""
    try:
        match shown:
            case Example() | Pair():
                return _item(shown)
            case Batch():
                return _batch(shown)
            case View():
                return render("notebook_view.html", view=shown, settings=shown.settings, ledger=shown.ledger)
            case Mixture():
                return render("notebook_mixture.html", mixture=shown, ledger=shown.ledger, label=_label)
            case Dataset():
                return render("notebook_dataset.html", dataset=shown, ledger=shown.ledger)
    except (PenstockError, OSError):
        return None
    return None


def stats_html(stats: Stats) -> str:
    """A table of the figures."""
    return render("notebook_stats.html", stats=stats)


def _item(item: Example | Pair) -> str:
    return render("notebook_item.html", sides=_sides(item), place=item.row, run=_run)


def _sides(item: Example | Pair) -> list[tuple[str, Example, list[Any], TokenBytes]]:
    return [
        (name, example, list(blocks(example, _MOST, prompt)), safe_bytes(example.dataset))
        for name, example, prompt in sides_of(item)
    ]


def _label(member: Member) -> str:
    each = f"{len(member.view):,} items, {member.per_epoch:,} of them per epoch"
    return f"{each} · train_on {member.view.settings.train_on} · dataset {member.view.dataset.key[:15]}…"


def _batch(batch: Batch) -> str:
    items = [] if batch.served is None else [_sides(batch.served[int(item)]) for item in batch.items[:_SHOWN]]
    shapes = [
        (name, "×".join(map(str, getattr(tensor, "shape", ()))) or str(tensor), str(getattr(tensor, "dtype", "")))
        for name, tensor in batch.tensors.items()
    ]
    return render("notebook_batch.html", batch=batch, shapes=shapes, items=items, run=_run)


def _run(run: TokenRun, table: TokenBytes) -> Markup:
    """Tokens with their ids as titles. Both are safe: ids are numbers, and text is escaped."""
    texts = zip(run.ids, token_texts(run.ids, table), strict=True)
    return Markup("".join(f'<span title="{token}">{escape(text or f"⟨{token}⟩")}</span>' for token, text in texts))  # noqa: S704
