"""Prints one example token by token: the origin of each run, and whether it is trained.

Each run of tokens gets a line labelled with its message, role, part and token count; continuation lines are indented.
Trained text is green and marked with `+` in the gutter, so the output is readable with and without colours.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex

import numpy as np
from rich.cells import cell_len, chop_cells
from rich.console import Console, Group, JustifyMethod
from rich.table import Table
from rich.text import Text

from penstock.build.estimate import Estimate
from penstock.errors import UsageError
from penstock.load.example import Example, Pair
from penstock.load.parts import PART_NAMES
from penstock.load.view import Served
from penstock.look.compare import DatasetDiff, Difference
from penstock.look.statistics import Spread, Stats
from penstock.look.tokens import visible_lines
from penstock.prepare.chat.conversation import Part, Role

if TYPE_CHECKING:
    from penstock.build.turns_preview import TurnsCompared


TokenBytes = Callable[[int], bytes]
_LEAST_WIDTH = len("context")
_COLOURS = {  # of names of parts; markup is plain
    Part.REASONING: "magenta",
    Part.REASONING_MARKUP: "magenta",
    Part.EMPTY_REASONING: "magenta",
    Part.CALL_NAME: "yellow",
    Part.CALL_ARGUMENTS: "yellow",
    Part.CALL_MARKUP: "yellow",
}


class Stretch(NamedTuple):
    """Consecutive tokens of one run with one weight."""

    message: int
    role: Role
    part: Part
    weight: float
    ids: list[int]


def show(view: Served, index: SupportsIndex, token_bytes: TokenBytes, console: Console) -> None:
    """Print an item of a view; `token_bytes` returns the bytes of a token id."""
    item = view[index]
    if isinstance(item, Example):
        _show_example(item, "", token_bytes, console)
        return
    _show_example(item.chosen, _side("chosen", item), token_bytes, console)
    _line(console, Text())
    _show_example(item.rejected, _side("rejected", item), token_bytes, console)


def stretches(example: Example) -> Iterator[Stretch]:
    """The non-empty runs of an example, split where the weight changes."""
    runs, weights = example.runs, example.loss_weights
    owner = np.repeat(np.arange(len(runs.roles)), runs.lengths)
    changes = np.flatnonzero((owner[1:] != owner[:-1]) | (weights[1:] != weights[:-1])) + 1
    bounds = [0, *changes.tolist(), len(example)] if len(example) else []
    for start, end in pairwise(bounds):
        run = int(owner[start])
        yield Stretch(
            int(runs.messages[run]),
            Role(int(runs.roles[run])),
            Part(int(runs.parts[run])),
            float(weights[start]),
            example.input_ids[start:end].tolist(),
        )


def label_name(desirable: bool) -> str:
    """KTO's label in words."""
    return "labelled as good" if desirable else "labelled as bad"


def _side(name: str, pair: Pair) -> str:
    return f"{name} (after a common prompt of {pair.prompt_length} tokens) · "


def _show_example(example: Example, side: str, token_bytes: TokenBytes, console: Console) -> None:
    trained, total = int(example.loss_mask.sum()), len(example)
    begin = f" · from token {example.start} of its row" if example.start else ""
    member = f"{example.row.member}: " if example.row.member else ""
    label = "" if example.desirable is None else f" · {label_name(example.desirable)}"
    place = f"{member}row {example.row.row} of source {example.row.source}{label}"
    _line(console, Text(f"{side}{place} · {total} tokens, {trained} trained ({trained / total:.0%}){begin}", "bold"))
    found = list(stretches(example))
    width = max([_LEAST_WIDTH, *(len(PART_NAMES[stretch.part]) for stretch in found)])
    _line(console, Text(f"{'#':>4}  {'role':<9}  {'part':<{width}}  {'tokens':>6}  {'weight':>6}", "dim"))
    for stretch in found:
        _show_stretch(stretch, width, token_bytes, console)


def _show_stretch(stretch: Stretch, width: int, token_bytes: TokenBytes, console: Console) -> None:
    trained = stretch.weight > 0
    number = "" if stretch.message < 0 else str(stretch.message)
    role, part = stretch.role.name.lower(), PART_NAMES[stretch.part]
    if stretch.role is Role.NONE:  # named as in reports
        role, part = "template", ""
    weight = f"{stretch.weight:g}" if trained else ""
    label = Text(f"{number:>4}  {role:<9}  {part:<{width}}  {len(stretch.ids):>6}  {weight:>6}  ", "cyan")
    label.stylize(_COLOURS.get(stretch.part, ""), 17, 17 + width)
    for line in visible_lines(b"".join(map(token_bytes, stretch.ids))):
        gutter = "+│ " if trained else " │ "
        for piece in _wrapped(line, console, len(label) + len(gutter)):
            _line(console, Text.assemble(label, (gutter, "dim"), (piece, "green" if trained else "dim")))
            label = Text(" " * len(label))


def _wrapped(line: str, console: Console, indent: int) -> list[str]:
    """The line, wrapped to its column in a terminal; piped output is not wrapped."""
    width = console.width - indent
    if not console.is_terminal or width < 20 or cell_len(line) <= width:
        return [line]
    return chop_cells(line, width)


def _line(console: Console, text: Text) -> None:
    # A soft wrap keeps the line whole when it is copied or piped.
    console.print(text, soft_wrap=True)


# ---- turns -----------------------------------------------------------------------------------------------------------
#
# The chains of a row, and each answer as inference produces it beside what later turns see of it.


def show_turns(view: Served, index: int, token_bytes: TokenBytes, console: Console) -> None:
    """Print all examples that a view has of an item's row, then its answers side by side."""
    items = list(_items(view, index))
    for item in items:
        show(view, item, token_bytes, console)
        console.print()
    console.print(turns_table([_example(view, item) for item in items], token_bytes))


def turns_table(chains: Sequence[Example], token_bytes: TokenBytes) -> Table:
    """The answers of a row's chains, of which the last one is the root."""
    table = Table("message", "chain", "trained", "in the last chain", "cut", title="turns", show_lines=True)
    root = chains[-1]
    for number, chain in enumerate(chains):
        for message in sorted(_trained(chain)):
            own, later = _ids(chain, message), _ids(root, message)
            texts = [b"".join(map(token_bytes, ids)) for ids in (own, later)]
            shown = [Text("\n".join(visible_lines(text))) for text in texts]
            cut = f"{len(own) - len(later):+d} tokens" if texts[0] != texts[1] else ""
            table.add_row(str(message), str(number), shown[0], shown[1] if cut else Text("the same", "dim"), cut)
    return table


def _items(view: Served, index: int) -> Iterator[int]:
    """The neighbouring items of the same row, whose examples are adjacent."""
    row = _example(view, index).row
    first = last = index
    while first and _example(view, first - 1).row == row:
        first -= 1
    while last + 1 < len(view) and _example(view, last + 1).row == row:
        last += 1
    return iter(range(first, last + 1))


def _example(view: Served, index: int) -> Example:
    item = view[index]
    if not isinstance(item, Example):
        raise UsageError("--turns: a preference pair has no chains")
    return item


def _owners(example: Example) -> np.ndarray:
    """The assistant message of each token; -1: none."""
    messages = np.where(example.runs.roles == Role.ASSISTANT, example.runs.messages, -1)
    return np.repeat(messages, example.runs.lengths)


def _trained(example: Example) -> set[int]:
    return set(_owners(example)[example.loss_mask].tolist()) - {-1}


def _ids(example: Example, message: int) -> list[int]:
    ids: list[int] = example.input_ids[_owners(example) == message].tolist()
    return ids


# ---- stats table -----------------------------------------------------------------------------------------------------
#
# Statistics as tables for the terminal.


_BAR = 40


def stats_table(stats: Stats) -> Group:
    """Totals, tokens by role and part, a histogram of lengths, and both modes of `--turns` if they differ."""
    parts = [_numbers(stats), _roles(stats), _parts(stats), _histogram(stats)]
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


def _parts(stats: Stats) -> Table:
    table = _grid("\ntrained tokens by part")
    for part, (tokens, trained) in stats.ledger.by_part.items():
        table.add_row(part, f"{trained:,} of {tokens:,} ({trained / tokens:.1%})")
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


# ---- compare table ---------------------------------------------------------------------------------------------------
#
# A comparison of two datasets for the terminal.


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
    parts = f", {one.parts[0]} → {one.parts[1]}" if one.parts[0] != one.parts[1] else ""
    head = (
        f"row {one.before} of A, row {one.after} of B{side}, {one.place}: {kind} {one.token} differs; "
        f"{one.tokens[0]:,} → {one.tokens[1]:,} tokens, {one.trained[0]:,} → {one.trained[1]:,} trained{parts}"
    )
    console.print(Text(head, "bold"), soft_wrap=True)
    for sign, text, token in (("-", one.was, one.was_id), ("+", one.now, one.now_id)):
        number = "end" if token is None else str(token)
        shown = f"{one.context}⟦{text}⟧".replace("↵\n", "↵")
        console.print(Text(f"  {sign} {number:>7} {shown}", _style(sign)), soft_wrap=True)


def _style(line: str) -> str:
    return {"-": "red", "+": "green"}.get(line[:1], "dim")


# ---- table -----------------------------------------------------------------------------------------------------------
#
# Prints an estimate as a table.


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
