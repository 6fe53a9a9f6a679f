"""Statistics of an export: documents, tokens and trained tokens per source, and a histogram of lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.export.rows import Block, ExportRows
from penstock.view.mixture import BaseMixture

COUNTS = ("documents", "tokens", "trained")


class PartStatistics:
    """Counts the documents and tokens of a part while a format writes it."""

    def __init__(self) -> None:
        self.sources: dict[int, list[int]] = {}
        self.longest = 0
        self.histogram = np.zeros(64, np.int64)  # entry b counts lengths from 2**(b-1) to 2**b - 1

    def count(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Yields the blocks unchanged while counting them."""
        for block in blocks:
            self._add(block)
            yield block

    def _add(self, block: Block) -> None:
        sources = np.unique(block.sources).tolist()
        if len(sources) == 1:
            amounts = [(len(block.sources), len(block.ids), int(np.count_nonzero(block.trained)))]
        else:
            amounts = _by_source(block, sources)
        for source, counted in zip(sources, amounts, strict=True):
            known = self.sources.get(source, [0, 0, 0])
            self.sources[source] = [a + b for a, b in zip(known, counted, strict=True)]
        self.longest = max(self.longest, int(block.lengths.max(initial=0)))
        self.histogram += np.bincount(np.frexp(block.lengths)[1], minlength=64)

    def to_json(self) -> dict[str, Any]:
        """The counts as JSON-compatible values, for the part's record."""
        histogram = {str(bits): int(count) for bits, count in enumerate(self.histogram) if count}
        sources = {str(source): counts for source, counts in sorted(self.sources.items())}
        return {"sources": sources, "longest": self.longest, "histogram": histogram}


def _by_source(block: Block, sources: list[int]) -> list[tuple[int, int, int]]:
    """Documents, tokens and trained tokens of each source."""
    trained = np.add.reduceat(block.trained, block.starts, dtype=np.int64)  # no sequence is empty
    lengths = block.lengths
    if len(block.prompts):
        lengths, trained = (array.reshape(2, -1).sum(axis=0) for array in (lengths, trained))
    chosen = [block.sources == source for source in sources]
    return [(int(own.sum()), int(lengths[own].sum()), int(trained[own].sum())) for own in chosen]


def sum_statistics(records: Iterable[Mapping[str, Any]], rows: ExportRows) -> dict[str, Any]:
    """Adds up the statistics of all parts."""
    sources: dict[int, list[int]] = {}
    histogram: dict[int, int] = {}
    longest = 0
    for record in records:
        for source, counts in record["sources"].items():
            known = sources.get(int(source), [0, 0, 0])
            sources[int(source)] = [a + b for a, b in zip(known, counts, strict=True)]
        for bits, count in record["histogram"].items():
            histogram[int(bits)] = histogram.get(int(bits), 0) + count
        longest = max(longest, record["longest"])
    named = {_name(rows, source): dict(zip(COUNTS, sources[source], strict=True)) for source in sorted(sources)}
    total = {name: sum(counts[name] for counts in named.values()) for name in COUNTS}
    lengths = {f"{1 << bits >> 1}-{(1 << bits) - 1}": histogram[bits] for bits in sorted(histogram)}
    return {**total, "longest": longest, "lengths": lengths, "sources": named}


def _name(rows: ExportRows, source: int) -> str:
    """The name of a mixture's part, or of a source file without its path, which must not be exported."""
    if isinstance(rows.served, BaseMixture) and len(rows.served.shares) > 1:
        return list(rows.served.shares)[source]
    files = getattr(rows.views[0].dataset, "notes", {}).get("files", [])
    names = [Path(file["name"]).name for file in files]
    if source >= len(names):
        return f"source {source}"
    return names[source] if names.count(names[source]) == 1 else f"{names[source]} (source {source})"


def format_statistics(statistics: Mapping[str, Any]) -> str:
    """Formats the statistics as text."""
    lines = [
        f"documents       {statistics['documents']:,}",
        f"tokens          {statistics['tokens']:,}",
        f"trained tokens  {statistics['trained']:,} ({_share(statistics['trained'], statistics['tokens'])})",
        f"longest         {statistics['longest']:,} tokens",
        "",
        "lengths (tokens)",
        *(f"  {bounds:>17}  {count:,}" for bounds, count in statistics["lengths"].items()),
        "",
        "sources",
    ]
    for name, counts in statistics["sources"].items():
        share = _share(counts["trained"], counts["tokens"])
        lines.append(f"  {name}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, {share} trained")
    return "\n".join(lines) + "\n"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f}%"
