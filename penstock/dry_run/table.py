"""Prints an estimate as a table."""

from __future__ import annotations

import datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.dry_run.predict import Estimate


def show_estimate(console: Console, found: Estimate) -> None:
    """Prints what a build would produce and cost."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for label, text in _facts(found):
        table.add_row(Text(label), Text(text))
    console.print(table, highlight=False)
    for warning in found.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))


def _facts(found: Estimate) -> list[tuple[str, str]]:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in found.rejected_kinds.items())
    machines = f"{found.workers} workers" + (f" on each of {found.nodes} nodes" if found.nodes > 1 else "")
    return [
        ("sample", f"{found.sampled_rows:,} rows, {_size(found.sampled_bytes)} of {_size(found.source_bytes)}"),
        ("rows", f"{found.rows:,}"),
        ("rejected", f"{found.rejected:,}" + (f" ({kinds})" if kinds else "")),
        ("tokens", f"{found.tokens:,}" + (f" ± {2 * found.error:.1%}" if found.error else "")),
        ("trained", f"{found.trained:,} ({found.trained_share:.1%})"),
        ("disk", _size(found.disk_bytes)),
        ("memory", f"{_size(found.memory_bytes)} per node, with {found.workers} workers"),
        ("time", f"{_time(found.seconds)} with {machines}, {_time(found.seconds_to_start)} of it to start and finish"),
        ("in the cache", _hits(found)),
    ]


def _hits(found: Estimate) -> str:
    if found.slices is None:
        return "unknown: this data was not read before"
    return f"{found.slices_found:,} of {found.slices:,} slices"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else str(datetime.timedelta(seconds=round(seconds)))


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
