"""The summary of a build, as facts for a terminal, a notebook or a script."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

from penstock.chat.notes import describe_note
from penstock.look.terminal.live import amount, duration, workers
from penstock.printable import printable

if TYPE_CHECKING:
    from penstock.build.prepare import Outcome
    from penstock.store.dataset import StoredDataset

WARNING = "warning"
Fact = tuple[str, str]  # (label, text); the label is '' if the line continues the one above


def facts(outcome: Outcome) -> list[Fact]:
    """Rows and tokens processed, rows left out, and speed."""
    progress = outcome.progress
    found = [*dataset_facts(outcome.dataset), ("slices", _slices(outcome))]
    if outcome.tokenizer:
        found.append(("tokenizer", outcome.tokenizer))
    if progress.slices_done:
        found.append(("engines", _engines(outcome)))
        speed = f"{amount(progress.bytes_per_second, 'B')}/s, {amount(progress.rows / progress.seconds)} rows/s"
        found.append(("time", f"{duration(progress.seconds)} ({speed}, {workers(progress)})"))
    if progress.checked:
        found.append(("spot check", _checks(outcome)))
    if progress.others_checked:
        refused = f", {progress.others_refused} refused and rebuilt" if progress.others_refused else ""
        compared = f"{progress.others_rows:,} rows compared with the reference engines{refused}"
        found.append(("others' shards", f"{progress.others_checked}: {compared}"))
    if outcome.quarantine:
        found.append(("set aside", str(outcome.quarantine)))
    return [*found, *((WARNING, text) for text in outcome.warnings)]


def dataset_facts(dataset: StoredDataset) -> list[Fact]:
    """The contents of a dataset, according to its ledger."""
    ledger = dataset.ledger
    rejected = sum(ledger["rejected"].values())
    found = [("rows", f"{ledger['rows']:,} in = {ledger['kept']:,} kept + {rejected:,} rejected")]
    found += [("", f"{count:,} {kind}") for kind, count in ledger["rejected"].items()]
    found.append(("tokens", f"{dataset.tokens:,} in {dataset.examples:,} examples"))
    names = [name for name in ("p50", "p90", "p99", "max") if name in ledger["lengths"]]
    found.append(("lengths", ", ".join(f"{name} {ledger['lengths'][name]:,}" for name in names)))
    if ledger["regions_unknown"]:
        found.append(("regions", f"{ledger['regions_unknown']:,} examples with unknown regions"))
    notes = ledger["notes"].items()
    return found + [
        ("note", f"{note}: {describe_note(note, count, dataset.recipe)}{_first_noted(dataset, note)}")
        for note, count in notes
    ]


def _first_noted(dataset: StoredDataset, note: str) -> str:
    """The location of the first row with a note; rows are counted from 0."""
    place = dataset.ledger.get("first_noted", {}).get(note)
    files = dataset.notes.get("files", [])
    if place is None or place[0] >= len(files):
        return ""
    return f" (first: {files[place[0]]['name']} row {place[1]})"


def one_line(outcome: Outcome) -> str:
    """The same facts on one line."""
    dataset, progress = outcome.dataset, outcome.progress
    how = "found in the cache" if outcome.hit else f"prepared in {duration(progress.seconds)}"
    rejected = sum(dataset.ledger["rejected"].values())
    aside = f", {rejected:,} rows set aside" if rejected else ""
    return f"penstock: {len(dataset):,} rows, {dataset.tokens:,} tokens {how}{aside} ({dataset.key[:11]})"


def as_html(title: str, lines: list[Fact]) -> str:
    """Facts as a small table for a notebook."""
    cell = '<td style="text-align:left;vertical-align:top;white-space:pre-wrap">'
    rows = "".join(
        f"<tr>{cell}<b>{escape(label)}</b></td>{cell}{escape(printable(text))}</td></tr>" for label, text in lines
    )
    return f"<div><code>{escape(title)}</code><table>{rows}</table></div>"


def _slices(outcome: Outcome) -> str:
    progress = outcome.progress
    if outcome.hit:
        return f"{len(outcome.dataset.shards)} found in the cache: nothing to do"
    parts = [f"{progress.slices_done} encoded"]
    if progress.slices_retried:
        parts.append(f"{progress.slices_retried} of them again, after {progress.retries} lost workers")
    if progress.slices_reused:
        parts.append(f"{progress.slices_reused} found in the cache")
    if progress.slices_elsewhere:
        parts.append(f"{progress.slices_elsewhere} encoded by other processes")
    return ", ".join(parts)


def _engines(outcome: Outcome) -> str:
    rows = max(outcome.progress.examples, 1)
    lines = []
    encoder, not_served = outcome.progress.encoder
    stages = [("encode", encoder)]
    if outcome.dataset.manifest.recipe["templates"]:
        stages.insert(0, ("render", "compiled template"))
    for stage, fast in stages:
        why = {k: n for k, n in outcome.progress.engines.get(stage, {}).items() if k != "masks by offsets"}
        slow = min(sum(why.values()), rows)
        share = "" if slow == 0 else f" for {100 * (rows - slow) / rows:.2f}% of the rows"
        lines.append(f"{stage}: {fast}{share}{_reasons(why)}")
    if not_served:
        lines.append(f"encode: {not_served}")
    return "\n".join(lines)


def _checks(outcome: Outcome) -> str:
    """The checks against the references."""
    progress = outcome.progress
    text = f"{progress.checked:,} rows compared with jinja2 and tokenizers"
    if progress.mismatches:
        return f"{text}: {progress.mismatches:,} differed, and their slices were recomputed"
    taken, compared = progress.paths
    ways = f", among them {compared} of the {taken} ways that rows take through the template" if taken else ""
    return f"{text}{ways}: all equal"


def _reasons(why: Mapping[str, int]) -> str:
    """Why rows took the slower way."""
    reasons = "; ".join(f"{n:,} rows more slowly: {reason}" for reason, n in sorted(why.items(), key=lambda e: -e[1]))
    return f" ({reasons})" if reasons else ""
