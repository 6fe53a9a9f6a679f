"""Runs an export: splits rows into parts, writes them in threads, records finished parts, commits with one rename.

Parts depend only on the rows' lengths and the options, so kills, reruns and any number of workers end in the same
bytes. Memory holds the view's index and one block per worker. Threads are enough: copying and writing release the GIL
and the disk is the bottleneck, while each process would have to scan the view again.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import orjson

from penstock.arguments import ExportArguments
from penstock.errors import UsageError
from penstock.exchange.folder import ExportFolder, store_errors
from penstock.exchange.format import ExportFormat, ExportPart, find_format
from penstock.exchange.options import Weights, WriteOptions
from penstock.exchange.rows import Block, ExportRows
from penstock.load.view import Count, Served
from penstock.options import read_options
from penstock.store.dataset import Dataset
from penstock.store.files import fault

# ---- statistics ------------------------------------------------------------------------------------------------------
#
# Statistics of an export: documents, tokens and trained tokens per source, and a histogram of lengths.


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
    """The name of a mixture's member, or of a source file without its path, which must not be exported."""
    if len(rows.served.members) > 1:
        return list(rows.served.members)[source]
    names = [Path(name).name for name in rows.served.source_names]
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


# ---- tokenizer -------------------------------------------------------------------------------------------------------
#
# The `tokenizer/` folder of an export: the dataset's own tokenizer.json, plus the files that transformers needs.


def write_tokenizer(dataset: Dataset, folder: ExportFolder) -> None:
    """Writes the dataset's tokenizer."""
    special = dict(dataset.recipe["special_tokens"])
    template = dataset.recipe["templates"].get("default")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    files = {
        "tokenizer.json": dataset.tokenizer_json,
        "tokenizer_config.json": orjson.dumps(config, option=orjson.OPT_INDENT_2),
    }
    if template is not None:
        files["chat_template.jinja"] = template.encode()
    for name, data in files.items():
        with folder.new(f"tokenizer/{name}") as file:
            file.write(data)


# ---- exporter --------------------------------------------------------------------------------------------------------


PROGRESS_SECONDS = 0.2  # between calls of `on_progress`
VERSION = 1  # bump when the same rows produce different bytes


@dataclass(slots=True)
class ExportProgress:
    """Progress of a running export."""

    parts_total: int
    tokens_total: int
    workers: int
    parts_done: int = 0
    parts_reused: int = 0
    tokens: int = 0  # written by this run, unfinished parts included
    tokens_reused: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started


OnExported = Callable[[ExportProgress], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """A finished export."""

    path: Path
    manifest: Mapping[str, Any]
    reused: bool  # the export already existed
    progress: ExportProgress

    def to_json(self) -> dict[str, Any]:
        """The result as JSON-compatible values."""
        progress = self.progress
        counts = {"written": progress.parts_done, "reused": progress.parts_reused, "workers": progress.workers}
        seconds = round(progress.seconds, 3)
        return {"path": str(self.path), "reused": self.reused, "parts": counts, "seconds": seconds, **self.manifest}


def export(
    served: Served,
    to: str,
    folder: str | os.PathLike[str],
    on_progress: OnExported | None = None,
    **arguments: Unpack[ExportArguments],
) -> Exported:
    """Writes a view or mixture in another trainer's format; a killed export resumes where it stopped."""
    chosen = find_format(to)
    options = read_options(WriteOptions, arguments, "an export")
    rows = ExportRows(
        served,
        capacity=options.capacity,
        epoch=options.epoch,
        shuffle_seed=options.shuffle_seed,
        separator=options.separator,
    )
    _check_rows(rows, to, chosen, options.weights)
    size = options.part_tokens or chosen.part_tokens
    where = ExportFolder(Path(folder))
    settings = _settings(rows, to, size)
    parts = split_parts(rows, size)
    run = _ExportRun(rows, chosen, where, parts, _workers(options.workers, len(parts)), on_progress)
    with store_errors(where):
        found = _existing(where, settings)
        if found is None:
            begun = where.begun()
            if begun is not None:
                _check_same(begun, settings, where.partial)
            chosen.check(rows)
            try:
                return Exported(where.target, run.write(settings), False, run.progress)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                    raise
                found = _existing(where, settings)  # another process finished the same export meanwhile
                if found is None:
                    raise
        where.clear()
        return Exported(where.target, found, True, run.progress)


def _existing(where: ExportFolder, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest of the same export if it exists and is complete; a different export is an error."""
    manifest = where.finished()
    if manifest is not None:
        _check_same(manifest.get("export", {}), settings, where.target)
        where.check_whole(manifest)
    return manifest


def split_parts(rows: ExportRows, size: int) -> list[ExportPart]:
    """Splits rows into parts of about `size` tokens, never within a row."""
    begins = np.concatenate(([0], rows.ends[:-1]))
    firsts = np.flatnonzero(np.diff(begins // size, prepend=-1)).tolist()
    lasts = [*firsts[1:], len(rows)]
    return [
        ExportPart(number, len(firsts), first, last, int(begins[first]), int(rows.ends[last - 1] - begins[first]))
        for number, (first, last) in enumerate(zip(firsts, lasts, strict=True))
    ]


class _ExportRun:
    """An export in progress."""

    def __init__(
        self,
        rows: ExportRows,
        chosen: ExportFormat,
        folder: ExportFolder,
        parts: list[ExportPart],
        workers: int,
        on_progress: OnExported | None,
    ) -> None:
        self._rows, self._format, self._folder, self._parts = rows, chosen, folder, parts
        self._on_progress = on_progress
        self._counting = threading.Lock()
        self.progress = ExportProgress(len(parts), rows.tokens, workers)

    def write(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Writes missing parts, commits, and returns the manifest."""
        if not self._folder.whole():
            self._folder.begin(settings)
            records = self._records()
            statistics = sum_statistics(records, self._rows)
            self._write_statistics(statistics)
            facts = self._format.finish(self._parts, self._rows, self._folder)
            write_tokenizer(self._rows.views[0].dataset, self._folder)
            files = _files(self._folder)
            manifest = {"export": settings, "facts": facts, "statistics": statistics, "files": files}
            self._folder.put_manifest(manifest)
        self._folder.commit()
        found = self._folder.finished()
        assert found is not None
        return found

    def _records(self) -> list[dict[str, Any]]:
        """The records of all parts, in order; missing parts are written first."""
        found: dict[int, dict[str, Any]] = {}
        for part in self._parts:
            record = self._folder.record(part.number)
            if record is not None:
                found[part.number] = record
                self.progress.parts_reused += 1
                self.progress.tokens_reused += part.tokens
        missing = [part for part in self._parts if part.number not in found]
        with ThreadPoolExecutor(self.progress.workers, "penstock-export") as pool:
            running: set[Future[tuple[int, dict[str, Any]]]] = {pool.submit(self._write_part, part) for part in missing}
            try:
                while running:
                    done, running = wait(running, timeout=PROGRESS_SECONDS, return_when=FIRST_EXCEPTION)
                    for future in done:
                        number, found[number] = future.result()
                        self.progress.parts_done += 1
                    if self._on_progress is not None:
                        self._on_progress(self.progress)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [found[part.number] for part in self._parts]

    def _write_part(self, part: ExportPart) -> tuple[int, dict[str, Any]]:
        statistics = PartStatistics()
        blocks = statistics.count(self._counted(self._rows.blocks(part.first, part.last)))
        files = self._format.write(part, blocks, self._rows, self._folder)
        record = {"files": files, **statistics.to_json()}
        fault("part.done")
        self._folder.put_record(part.number, record)
        return part.number, record

    def _counted(self, blocks: Iterator[Block]) -> Iterator[Block]:
        """Yields the same blocks and adds each to the progress once it is written."""
        for block in blocks:
            yield block
            with self._counting:
                self.progress.tokens += len(block.ids)

    def _write_statistics(self, statistics: dict[str, Any]) -> None:
        with self._folder.new("statistics.json") as file:
            file.write(orjson.dumps(statistics, option=orjson.OPT_INDENT_2))
        with self._folder.new("statistics.txt") as file:
            file.write(format_statistics(statistics).encode())


def _files(folder: ExportFolder) -> dict[str, int]:
    """All files and their sizes."""
    paths = sorted(path for path in folder.data.rglob("*") if path.is_file())
    return {path.relative_to(folder.data).as_posix(): path.stat().st_size for path in paths}


def _workers(requested: int | None, parts: int) -> int:
    return max(1, min(requested or min(len(os.sched_getaffinity(0)), 8), parts))


def _check_rows(rows: ExportRows, to: str, chosen: ExportFormat, weights: Weights) -> None:
    if rows.is_labelled and not chosen.supports.labels:
        raise UsageError(
            f"--to {to} has no place for the labels of answers (KTO). Use trl, or prepare the rows with --format "
            "prompt_completion or messages to ignore their labels."
        )
    if rows.is_preference and not chosen.supports.pairs:
        raise UsageError(f"--to {to} does not support preference pairs. Use trl, hf, parquet or jsonl.")
    if rows.separator is not None and not chosen.supports.separator:
        raise UsageError(f"--to {to} has document bounds and needs no --separator. Omit it.")
    if rows.capacity is not None and not chosen.supports.packed:
        raise UsageError(f"--to {to} does not support packed rows: its trainer packs. Omit --capacity.")
    if not chosen.supports.weights and weights is Weights.ERROR and rows.weighted:
        raise UsageError(
            f"some tokens have loss weights other than 0 and 1, and {to} only supports a mask. "
            "Use hf, parquet or jsonl, which carry loss_weights, or --weights mask to train such tokens fully."
        )


def _settings(rows: ExportRows, to: str, part_tokens: int) -> dict[str, Any]:
    """Everything that determines the bytes of an export."""
    served = rows.served
    views = [
        {
            "name": name,
            "dataset": view.dataset.key,
            "amount": None if amount is None else _amount(amount),
            **{key: _plain(value) for key, value in view.settings.stored.items()},
        }
        for name, (view, amount) in served.members.items()
    ]
    return {
        "version": VERSION,
        "to": to,
        "views": views,
        "seed": served.seed,
        "epoch": rows.epoch,
        "capacity": rows.capacity,
        "separator": rows.separator,
        "shuffle_seed": None if rows.shuffle_seed is None else str(rows.shuffle_seed),
        "part_tokens": part_tokens,
        "digest": served.digest,
    }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, StrEnum) else value


def _amount(amount: float | Count) -> Any:
    return {"count": amount.examples} if isinstance(amount, Count) else amount


def _check_same(there: Mapping[str, Any], here: Mapping[str, Any], path: Path) -> None:
    """Raises an error that lists the differences if a folder holds a different export."""
    found, expected = _flat(there), _flat(here)
    different = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    if different != ["digest"]:  # which follows from the others
        different = [name for name in different if name != "digest"]
    if different:
        listed = "; ".join(f"{name}: {found.get(name)!r} there, {expected.get(name)!r} here" for name in different)
        raise UsageError(f"{path} holds a different export ({listed}). Choose another folder with -o, or remove it.")


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Flattens nested settings to dotted names."""
    if isinstance(value, Mapping):
        entries = [(str(key), inner) for key, inner in value.items()]
    elif isinstance(value, list):
        entries = [(str(number), inner) for number, inner in enumerate(value)]
    else:
        return {name: value}
    return {key: leaf for inner, entry in entries for key, leaf in _flat(entry, f"{name}.{inner}".lstrip(".")).items()}
