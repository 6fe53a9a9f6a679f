"""A comparison of two datasets for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.look.compare import DatasetDiff, Difference


def print_comparison(compared: DatasetDiff, console: Console) -> None:
    """Print the changes: recipe, totals, then the first changed rows, each with its first differing token."""
    if compared.equal:
        console.print(f"no difference: {compared.before.rows:,} rows, {compared.before.tokens:,} tokens")
        return
    for change in compared.recipe:
        console.print(Text.assemble(("recipe ", "bold"), change.name), soft_wrap=True)
        for line in change.lines or (f"-{change.before}", f"+{change.after}"):
            console.print(Text(f"  {line}", _style(line)), soft_wrap=True)
    console.print(_totals(compared))
    counts = (
        f"rows: {compared.added:,} added, {compared.removed:,} removed, {compared.changed:,} changed, "
        f"{compared.masks_changed:,} with another mask only, {compared.content_changed:,} with equal tokens"
    )
    console.print(counts, highlight=False)
    if compared.moved:
        console.print("common rows are in a different order")
    for name, rows, count in (
        ("removed from A", compared.removed_rows, compared.removed),
        ("added in B", compared.added_rows, compared.added),
    ):
        if rows:
            more = f" and {count - len(rows):,} more" if count > len(rows) else ""
            console.print(f"{name}: rows {', '.join(map(str, rows))}{more}", highlight=False, soft_wrap=True)
    for difference in compared.differences:
        _print_difference(difference, console)


def _totals(compared: DatasetDiff) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("", "A", "B", "change"):
        table.add_column(column, justify="left" if not column else "right")
    for name, before, after in zip(("rows", "tokens", "trained"), compared.before, compared.after, strict=True):
        table.add_row(name, f"{before:,}", f"{after:,}", f"{after - before:+,}")
    return table


def _print_difference(one: Difference, console: Console) -> None:
    side = f" ({one.side})" if one.side else ""
    kind = "mask" if one.masks_only else "token"
    head = (
        f"row {one.before} of A, row {one.after} of B{side}, {one.place}: {kind} {one.token} differs; "
        f"{one.tokens[0]:,} → {one.tokens[1]:,} tokens, {one.trained[0]:,} → {one.trained[1]:,} trained"
    )
    console.print(Text(head, "bold"), soft_wrap=True)
    for sign, text, token in (("-", one.was, one.was_id), ("+", one.now, one.now_id)):
        number = "end" if token is None else str(token)
        shown = f"{one.context}⟦{text}⟧".replace("↵\n", "↵")
        console.print(Text(f"  {sign} {number:>7} {shown}", _style(sign)), soft_wrap=True)


def _style(line: str) -> str:
    return {"-": "red", "+": "green"}.get(line[:1], "dim")
