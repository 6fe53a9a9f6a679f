"""`penstock prepare`: sources in, a dataset and its summary out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table

from penstock.build.finish import outcome_json
from penstock.build.options import PrepareOptions, prepare_options
from penstock.build.prepare import Builder, Outcome
from penstock.chat.notes import Note, told
from penstock.cli.flags import with_flags
from penstock.cli.live import LiveProgress, amount, duration, progress_line


@with_flags(PrepareOptions)
def prepare(
    sources: Annotated[list[str], typer.Argument(help="Files, globs, folders or hub datasets", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output")] = False,
    *,
    given: dict[str, Any],
) -> None:
    """Render and tokenize conversations once, into a dataset that every run can share."""
    messages = Console(stderr=True)
    with LiveProgress(messages, progress_line) as live:
        builder = Builder(sources, prepare_options(given), live)
        messages.print(f"format: {builder.mapping.describe()}", highlight=False, markup=False)
        outcome = builder.run()
    if json:
        print(orjson.dumps(outcome_json(outcome), option=orjson.OPT_INDENT_2).decode())
    else:
        summary(Console(), outcome)


def summary(console: Console, outcome: Outcome) -> None:
    """What was done, what was left out, how fast, and how to go on."""
    dataset, progress, ledger = outcome.dataset, outcome.progress, outcome.dataset.ledger
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row(
        "rows", f"{ledger['rows']:,} in = {ledger['kept']:,} kept + {sum(ledger['rejected'].values()):,} rejected"
    )
    for kind, count in ledger["rejected"].items():
        table.add_row("", f"{count:,} {kind}")
    table.add_row("tokens", f"{dataset.tokens:,} in {dataset.examples:,} examples")
    lengths = sorted(ledger["lengths"].items(), key=lambda entry: entry[1])
    table.add_row("lengths", ", ".join(f"{name} {value:,}" for name, value in lengths))
    if ledger["regions_unknown"]:
        table.add_row("regions", f"{ledger['regions_unknown']:,} examples with unknown regions")
    for note, count in ledger["notes"].items():
        table.add_row("note", f"{note}: {told(note, count)}{_first_noted(outcome, note)}", style=_style(note))
    table.add_row("slices", _slices(outcome))
    if outcome.tokenizer:
        table.add_row("tokenizer", outcome.tokenizer)
    if progress.slices_done:
        table.add_row("engines", _engines(outcome))
        speed = f"{amount(progress.bytes_per_second, 'B')}/s, {amount(progress.rows / progress.seconds)} rows/s"
        table.add_row("time", f"{duration(progress.seconds)} ({speed}, {progress.workers} workers)")
    if progress.checked:
        table.add_row("spot check", _checks(outcome))
    if progress.others_checked:
        refused = f", {progress.others_refused} refused and made again" if progress.others_refused else ""
        compared = f"{progress.others_rows:,} rows compared with the reference engines{refused}"
        table.add_row("others' shards", f"{progress.others_checked}: {compared}")
    if outcome.quarantine:
        table.add_row("set aside", str(outcome.quarantine))
    for warning in outcome.warnings:
        table.add_row("[yellow]warning[/]", warning)
    console.print(table, highlight=False)
    console.print(f"\n{dataset.path}", highlight=False, soft_wrap=True, markup=False)
    console.print("\n[dim]import penstock as ps[/]", highlight=False)
    console.print(f'[dim]view = ps.open("{dataset.path}").view(max_length=4096)[/]', highlight=False, soft_wrap=True)


def _first_noted(outcome: Outcome, note: str) -> str:
    """Where the first row with a note is; rows are counted from 0."""
    place = outcome.dataset.ledger["first_noted"].get(note)
    files = outcome.dataset.notes.get("files", [])
    if place is None or place[0] >= len(files):
        return ""
    return f" (first: {files[place[0]]['name']} row {place[1]})"


def _style(note: str) -> str | None:
    return "yellow" if note in set(Note) and Note(note).is_loss else None


def _slices(outcome: Outcome) -> str:
    progress = outcome.progress
    if outcome.hit:
        return f"{len(outcome.dataset.shards)} found in the cache: nothing to do"
    parts = [f"{progress.slices_done} made"]
    if progress.slices_reused:
        parts.append(f"{progress.slices_reused} found in the cache")
    if progress.slices_elsewhere:
        parts.append(f"{progress.slices_elsewhere} made by other processes")
    return ", ".join(parts)


def _engines(outcome: Outcome) -> str:
    rows = max(outcome.progress.examples, 1)
    lines = []
    encoder, not_served = outcome.progress.encoder
    stages = [("encode", encoder)]
    if outcome.dataset.manifest.recipe["templates"]:
        stages.insert(0, ("render", "machine"))
    for stage, fast in stages:
        why = {k: n for k, n in outcome.progress.engines.get(stage, {}).items() if k != "masks by offsets"}
        slow = min(sum(why.values()), rows)
        text = f"{stage}: {fast}" if slow == rows else f"{stage}: {100 * (rows - slow) / rows:.2f}% {fast}"
        lines.append(text + _reasons(why, "by the reference"))
    if not_served:
        lines.append(f"encode: {not_served}")
    return "\n".join(lines)


def _checks(outcome: Outcome) -> str:
    """What was compared with the references."""
    progress = outcome.progress
    text = f"{progress.checked:,} rows compared with the reference engines"
    if progress.mismatches:
        return f"{text}, {progress.mismatches:,} differed (their slices were redone)"
    taken, compared = progress.paths
    return f"{text}; paths: {compared} of {taken} checked" if taken else text


def _reasons(why: Mapping[str, int], how: str) -> str:
    reasons = "; ".join(f"{n:,} {how}: {reason}" for reason, n in sorted(why.items(), key=lambda e: -e[1]))
    return f" ({reasons})" if reasons else ""
