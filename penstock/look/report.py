"""The report: one self-contained HTML file that needs no network.

Style and script are inlined and allowed by hash only, so rows can't execute anything. All figures come from `stats`,
which `penstock stats --json` prints. The cost is that of the statistics plus a few milliseconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from penstock import __version__
from penstock.look.advice import advice
from penstock.look.fill import best
from penstock.look.flow import flow
from penstock.look.html import render, script, source_hash, stylesheet
from penstock.look.lineage import lineage
from penstock.look.runs_folder import TrainingRun
from penstock.look.stats import Stats, stats
from penstock.look.tokens import MessageBlock, blocks, safe_bytes, sides_of
from penstock.store.dataset import StoredDataset
from penstock.view.view import BaseView

SAMPLES: Final = 6
SAMPLE_TOKENS: Final = 700  # tokens shown per sampled sequence


class Sample(NamedTuple):
    """A sequence shown in the report."""

    row: int
    side: str
    tokens: int
    trained: int
    blocks: list[MessageBlock]


def report(
    view: BaseView, *, capacity: int | None = None, run: TrainingRun | None = None, samples: int = SAMPLES
) -> str:
    """The report on a view of a cached dataset, as HTML."""
    style, code = stylesheet(), script()
    policy = f"default-src 'none'; style-src {source_hash(style)}; script-src {source_hash(code)}; base-uri 'none'"
    figures = report_figures(view, stats(view, capacity), run, samples)
    return render("report.html", **figures, style=style, script=code, csp=f"{policy}; form-action 'none'", linked=False)


def report_figures(view: BaseView, counted: Stats, run: TrainingRun | None, samples: int = SAMPLES) -> dict[str, Any]:
    """The variables of the report's template, apart from style and script."""
    dataset = view.dataset
    assert isinstance(dataset, StoredDataset)
    return {
        "stats": counted,
        "settings": view.settings,
        "flow": flow(counted),
        "advice": advice(counted, view.settings),
        "best": best(counted.packing),
        "lineage": lineage(dataset),
        "samples": _samples(view, samples),
        "bytes_of": safe_bytes(dataset),
        "run": run,
        "preference": dataset.is_preference,
        "path": str(dataset.path),
        "version": __version__,
    }


def _samples(view: BaseView, count: int) -> list[Sample]:
    """A deterministic sample of items across the lengths: the shortest, the longest, and some in between."""
    if not len(view):
        return []
    lengths = view.lengths if view.lengths.ndim == 1 else view.lengths.max(axis=1)
    spread = np.quantile(np.arange(len(lengths)), np.linspace(0, 1, count), method="nearest")
    order = np.argsort(lengths, kind="stable")
    found = []
    for item in dict.fromkeys(order[spread.astype(np.int64)].tolist()):
        for side, example, prompt in sides_of(view[item]):
            shown = blocks(example, SAMPLE_TOKENS, prompt)
            found.append(Sample(int(view.numbers[item]), side, len(example), int(example.loss_mask.sum()), shown))
    return found


def write_report(page: str, path: Path) -> None:
    """Write the page atomically, so that a browser never sees half of it."""
    partial = path.with_name(f".{path.name}.part")
    partial.write_text(page, encoding="utf-8")
    partial.replace(path)
