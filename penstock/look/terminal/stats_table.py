"""Statistics as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, JustifyMethod
from rich.table import Table

from penstock.look.stats import Spread, Stats

if TYPE_CHECKING:
    from penstock.build.turns_preview import TurnsCompared

_BAR = 40


def stats_table(stats: Stats) -> Group:
    """Totals, tokens by role, a histogram of lengths, and both modes of `--turns` if they differ."""
    parts = [_numbers(stats), _roles(stats), _histogram(stats)]
    return Group(*parts, *([_turns(stats.turns)] if stats.turns else []))


def _grid(title: str, justify: JustifyMethod = "right") -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan")
    table.add_column(justify=justify)
    return table


def _numbers(stats: Stats) -> Table:
    table = _grid("", "left")
    table.add_row("rows", f"{stats.rows:,}")
    if stats.sequences != stats.rows:
        table.add_row("sequences", f"{stats.sequences:,}")
    if stats.desirable is not None:
        table.add_row("labels", f"{stats.desirable:,} good, {stats.sequences - stats.desirable:,} bad")
    for member in stats.members:
        table.add_row(f"member {member.name}", f"{member.items:,} items, {member.per_epoch:,} of them per epoch")
    table.add_row("tokens", f"{stats.tokens:,}")
    table.add_row("trained", f"{stats.trained:,} ({stats.trained_share:.1%})")
    if stats.cut_rows:
        table.add_row("over the maximum length", f"{stats.cut_rows:,} rows, {stats.cut_tokens:,} tokens cut")
    table.add_row("tokens per sequence", _spread(stats.lengths))
    table.add_row("messages per sequence", _spread(stats.messages))
    table.add_row("rows without a trained token", f"{stats.rows_without_trained_token:,}")
    table.add_row("rows with unknown regions", f"{stats.rows_with_unknown_regions:,}")
    table.add_row("duplicate rows", f"{stats.duplicate_rows:,}")
    return table


def _spread(spread: Spread) -> str:
    quantiles = f"p50 {spread.p50:,} · p90 {spread.p90:,} · p99 {spread.p99:,} · max {spread.max:,}"
    return f"mean {spread.mean:,.1f} · {quantiles}"


def _roles(stats: Stats) -> Table:
    table = _grid("\ntokens by role")
    for role, tokens in stats.tokens_by_role.items():
        table.add_row("template" if role == "none" else role, f"{tokens:,} ({tokens / stats.tokens:.1%})")
    return table


def _histogram(stats: Stats) -> Table:
    table = _grid("\nsequences by length")
    table.add_column(style="green")
    most = max((bar.sequences for bar in stats.histogram), default=0)
    for bar in stats.histogram:
        filled = "█" * (-(-_BAR * bar.sequences // most))  # rounded up, so that small counts stay visible
        table.add_row(f"{bar.low:,} to {max(bar.high - 1, bar.low):,}", f"{bar.sequences:,}", filled)
    return table


def _turns(compared: TurnsCompared) -> Table:
    title = f"\n--turns, on the first {compared.rows:,} rows"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("", style="cyan")
    for name in ("examples", "tokens of a run", "with collate=tree", "trained"):
        table.add_column(name, justify="right")
    for mode, totals in (("conversation", compared.conversation), ("faithful", compared.faithful)):
        counts = (totals.examples, totals.tokens, totals.stored, totals.trained)
        table.add_row(mode, *(f"{count:,}" for count in counts))
    return table
