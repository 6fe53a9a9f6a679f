"""The report: one self-contained HTML file that needs no network.

Style and script are inlined and allowed by hash only, so rows can't execute anything. All figures come from `stats`,
which `penstock stats --json` prints. The cost is that of the statistics plus a few milliseconds.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from functools import partial
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from penstock import __version__
from penstock.errors import StoreError
from penstock.look.advice import advice
from penstock.look.fill import best
from penstock.look.flow import flow
from penstock.look.html import render, script, source_hash, stylesheet
from penstock.look.lineage import lineage, mixture_lineage
from penstock.look.runs_folder import TrainingRun
from penstock.look.stats import stats
from penstock.look.terminal.show import label_name
from penstock.look.tokens import MessageBlock, blocks, safe_bytes, sides_of
from penstock.store.dataset import StoredDataset
from penstock.view.mixture import BaseMixture
from penstock.view.view import BaseView

SAMPLES: Final = 6
SAMPLE_TOKENS: Final = 700  # tokens shown per sampled sequence


class Sample(NamedTuple):
    """A sequence shown in the report."""

    row: int
    side: str  # of a pair, or KTO's label
    tokens: int
    trained: int
    blocks: list[MessageBlock]


def report(
    view: BaseView | BaseMixture, *, capacity: int | None = None, run: TrainingRun | None = None, samples: int = SAMPLES
) -> str:
    """The report on a view of a cached dataset, or on a mixture of such views, as HTML."""
    style, code = stylesheet(), script()
    policy = f"default-src 'none'; style-src {source_hash(style)}; script-src {source_hash(code)}; base-uri 'none'"
    figures = report_figures(view, capacity, run, samples)
    return render("report.html", **figures, style=style, script=code, csp=f"{policy}; form-action 'none'", linked=False)


def report_figures(
    view: BaseView | BaseMixture, capacity: int | None, run: TrainingRun | None, samples: int = SAMPLES
) -> dict[str, Any]:
    """The variables of the report's template, apart from style and script."""
    first = next(iter(view.shares.values())).view if isinstance(view, BaseMixture) else view
    counted, settings, dataset = stats(view, capacity), first.settings, first.dataset
    assert isinstance(dataset, StoredDataset)
    return {
        "stats": counted,
        "settings": settings,
        "flow": flow(counted),
        "advice": advice(counted, settings),
        "best": best(counted.packing),
        "packed": next((fill for fill in counted.packing if fill.capacity == capacity), best(counted.packing)),
        "lineage": lineage(dataset) if isinstance(view, BaseView) else mixture_lineage(view),
        "row_name": partial(_row_name, _first_rows(view)),
        "samples": _samples(view, samples),
        "bytes_of": safe_bytes(dataset),
        "run": run,
        "preference": dataset.is_preference,
        "path": str(dataset.path) if isinstance(view, BaseView) else "",
        "version": __version__,
    }


def _first_rows(view: BaseView | BaseMixture) -> dict[str, int]:
    """The number of each member's first row, in the numbering of `stats`; no member: a view."""
    if isinstance(view, BaseView):
        return {}
    sizes = [len(share.view.dataset) for share in view.shares.values()]
    return dict(zip(view.shares, accumulate(sizes, initial=0), strict=False))


def _row_name(members: dict[str, int], row: int) -> str:
    name, first = max(((n, f) for n, f in members.items() if f <= row), key=itemgetter(1), default=("", 0))
    return f"{name}, row {row - first:,}" if name else f"row {row:,}"


def _samples(view: BaseView | BaseMixture, count: int) -> list[Sample]:
    """A deterministic sample of items across the lengths: the shortest, the longest, and some in between."""
    if not len(view):
        return []
    lengths = view.lengths if view.lengths.ndim == 1 else view.lengths.max(axis=1)
    spread = np.quantile(np.arange(len(lengths)), np.linspace(0, 1, count), method="nearest")
    order = np.argsort(lengths, kind="stable")
    found, members = [], _first_rows(view)
    for item in dict.fromkeys(order[spread.astype(np.int64)].tolist()):
        if isinstance(view, BaseMixture):
            name, number = view.place(item)
            row = members[name] + int(view.shares[name].view.numbers[number])
        else:
            row = int(view.numbers[item])
        for side, example, prompt in sides_of(view[item]):
            label = " · ".join(filter(None, (side, "" if example.desirable is None else label_name(example.desirable))))
            shown = blocks(example, SAMPLE_TOKENS, prompt)
            found.append(Sample(row, label, len(example), int(example.loss_mask.sum()), shown))
    return found


def write_report(page: str, path: Path) -> None:
    """Write the page atomically, so that a browser never sees half of it. A failure leaves nothing behind."""
    unfinished = path.with_name(f".{path.name}.part")
    try:
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
        raise StoreError(f"{path}: the report can't be written: {why}. Choose another place with --output.") from error
