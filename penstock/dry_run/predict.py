"""Prepares a sample of the rows in a temporary cache, and scales its tokens, disk, time and memory up to all rows."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, cycle, pairwise
from pathlib import Path
from typing import Any

from penstock.build.options import OnBadRow, OnDropped, OnMiss, PrepareOptions
from penstock.build.prepare import SMALL_BYTES, Builder
from penstock.build.progress import Progress
from penstock.dry_run.sample import Limits, sample_rows
from penstock.look.stats import stats
from penstock.sources import FileKind, KeepData, Slice, SourceFile, identity
from penstock.sources.reading import scan
from penstock.sources.slices import SLICE_SIZES
from penstock.store.manifest import shard_name

USUAL_SPEED = 25e6  # bytes per second, where one slice is all there is
MANY_SLICES = 200  # above this many more slices than in the sample, the cost of a slice is measured
FEW_FILES, MORE_FILES = 4, 68  # of one row each, to measure it
MEMO_BYTES = 900  # of a file's plan, which is not stored for files as young as those of the measurement
PARENT_BYTES = 150 << 20  # memory of the process that drives the workers


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a build would produce and cost. Sizes are in bytes."""

    rows: int
    rejected: int
    rejected_kinds: dict[str, int]
    examples: int
    tokens: int
    trained: int
    trained_share: float
    error: float  # standard error of the number of tokens, as a share of it; 0 if all rows were prepared
    source_bytes: int  # of rows as JSON
    disk_bytes: int  # of the cache, all slices new
    seconds: float
    seconds_to_start: float  # of it, before the first slice and after the last
    memory_bytes: int  # per node
    bytes_per_second: float  # of one worker
    bytes_per_second_to_cut: float  # of the process that cuts slices: each node reads all the data
    workers: int
    nodes: int
    slices: int | None  # None: not known before the data is read
    slices_found: int  # in the cache
    sampled_rows: int
    sampled_bytes: int
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class _Watch:
    """Notes when slices are done, to tell the speed of a warm worker from the time to start."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.done: list[tuple[float, int, int]] = []  # seconds, bytes and tokens so far

    def __call__(self, progress: Progress) -> None:
        self.done.append((time.monotonic() - self.began, progress.bytes, progress.tokens))

    def speed(self) -> float:
        """Bytes per second after the first slice."""
        (first, before, _), (last, after, _) = self.done[0], self.done[-1]
        return (after - before) / (last - first) if last > first else USUAL_SPEED

    def error(self) -> float:
        """Standard error of the tokens per byte, from the slices."""
        counts = [(0, 0), *((size, tokens) for _, size, tokens in self.done)]
        sizes = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(counts) if b[0] > a[0]]
        total, tokens = counts[-1]
        if len(sizes) < 2 or not tokens:
            return 0.0
        rate = tokens / total
        spread = sum((found - rate * size) ** 2 for size, found in sizes) / (len(sizes) - 1) * len(sizes)
        return float(spread**0.5 / tokens)


def predict(
    sources: Iterable[object], options: PrepareOptions, *, nodes: int = 1, tokenizer: object = None
) -> Estimate:
    """Predicts the result and the cost of `prepare` on `nodes` machines like this one. Builds nothing in the cache."""
    began = time.monotonic()
    builder = Builder(sources, options, None, tokenizer)
    workers = builder.progress.workers if options.workers == "auto" else int(options.workers)  # here or elsewhere
    slices = builder.slices_if_known()
    limits = Limits(options.max_row_bytes, builder.recipe.mapping.read_columns)
    loaded = time.monotonic()
    sample = sample_rows(builder.sources, builder.known_files(), limits)
    seconds_to_read = time.monotonic() - loaded
    with tempfile.TemporaryDirectory(prefix="penstock-estimate-") as folder:
        file = Path(folder, "sample.jsonl")
        first = builder.first_rows() if _is_text(builder) and not sample.is_everything else []  # decide the format
        file.write_bytes(b"".join(map(_line, chain(first, sample.rows))))
        watch = _Watch()
        outcome = Builder([file], _for_sample(options, Path(folder, "cache")), watch, tokenizer).run()
        elapsed = time.monotonic() - watch.began
        cut_speed = _cut_speed(file)
        trained = stats(outcome.dataset).trained
        fixed, growing = _disk(outcome.dataset.cache.root)
        more_slices = max(0, _slice_count(builder, slices) - len(outcome.dataset.shards))
        slice_seconds, slice_bytes = 0.0, 0.0
        if more_slices > MANY_SLICES:
            slice_seconds, slice_bytes = _slice_cost(sample.rows, options, tokenizer, Path(folder))
    ledger, done = outcome.dataset.ledger, outcome.progress
    prepared = done.bytes + ledger["rows"]  # with one byte per row, as the sample counts them
    scale = 1.0 if sample.is_everything else sample.total_bytes / max(1, prepared)
    speed = watch.speed()
    reading = seconds_to_read / max(1, prepared) if not _is_plain(builder) else 0.0
    idle = max(0.0, elapsed - done.bytes / speed) + loaded - began
    found = _found(builder, slices)
    left = sample.total_bytes * (1 - (found / len(slices) if slices else 0))
    busy = max(left * (1 / speed + reading) / (workers * nodes), sample.total_bytes / cut_speed)
    at_once = workers * nodes if sample.total_bytes > SMALL_BYTES else 1
    busy += more_slices * slice_seconds * (left / max(1, sample.total_bytes)) / at_once
    return Estimate(
        rows=round(sample.total_rows),
        rejected=round(sum(ledger["rejected"].values()) * scale + sample.oversize),
        rejected_kinds={kind: round(count * scale) for kind, count in ledger["rejected"].items()},
        examples=round(ledger["examples"] * scale),
        tokens=round(ledger["tokens"] * scale),
        trained=round(trained * scale),
        trained_share=trained / max(1, ledger["tokens"]),
        error=0.0 if sample.is_everything else watch.error(),
        source_bytes=round(sample.total_bytes),
        disk_bytes=round(fixed + growing * scale + more_slices * slice_bytes),
        seconds=idle + busy,
        seconds_to_start=idle,
        memory_bytes=workers * done.memory + (PARENT_BYTES if workers > 1 else 0),
        bytes_per_second=speed,
        bytes_per_second_to_cut=cut_speed,
        workers=workers,
        nodes=nodes,
        slices=len(slices) if slices else None,
        slices_found=found,
        sampled_rows=ledger["rows"],
        sampled_bytes=done.bytes,
        warnings=outcome.warnings,
    )


def _slice_count(builder: Builder, slices: Sequence[Slice] | None) -> int:
    """How many slices there are, or about how many: at least one of each file."""
    if slices is not None:
        return len(slices)
    sizes = (identity(file.path).size for file in builder.sources.files)
    return sum(max(1, round(size / SLICE_SIZES.mean)) for size in sizes) if builder.sources.is_whole else 0


def _slice_cost(rows: Sequence[bytes], options: PrepareOptions, tokenizer: object, folder: Path) -> tuple[float, float]:
    """Seconds and bytes on disk of a slice, however small it is: from building few and more files of a row each."""
    measured: list[tuple[float, int]] = []
    for count in (FEW_FILES, MORE_FILES):
        place = folder / str(count)
        place.mkdir()
        files = [place / f"{number}.jsonl" for number in range(count)]
        for file, row in zip(files, cycle(rows), strict=False):
            file.write_bytes(_line(row))
        began = time.monotonic()
        Builder(files, _for_sample(options, place / "cache"), None, tokenizer).run()
        measured.append((time.monotonic() - began, sum(_disk(place / "cache"))))
    (few, least), (more, most) = measured
    rows_bytes = (most - least) / (MORE_FILES - FEW_FILES)
    return max(0.0, more - few) / (MORE_FILES - FEW_FILES), rows_bytes + MEMO_BYTES


def _for_sample(options: PrepareOptions, cache: Path) -> PrepareOptions:
    """The same recipe, on one worker, with bad rows counted."""
    return replace(
        options, cache=str(cache), local_cache=None, workers="1", split=None, limit=None, config=None, revision=None,
        no_cache=False, quarantine_file=cache.parent / "quarantine.jsonl", on_bad_row=OnBadRow.QUARANTINE,
        on_dropped=OnDropped.WARN, on_miss=OnMiss.BUILD, rank=0, world_size=1,
    )  # fmt: skip


def _line(row: bytes) -> bytes:
    """A row on a line of its own; rows of arrays may hold line breaks between their values."""
    return (b" ".join(row.splitlines()) if b"\n" in row or b"\r" in row else row) + b"\n"


def _is_text(builder: Builder) -> bool:
    return all(file.kind.is_text for file in builder.sources.files)


def _is_plain(builder: Builder) -> bool:
    return all(file.kind is FileKind.JSONL for file in builder.sources.files)


def _cut_speed(file: Path) -> float:
    """Bytes per second at which a process finds slices."""
    began = time.perf_counter()
    size = sum(part.size for part in scan(SourceFile(0, file, FileKind.JSONL, file.name), keep=KeepData.NONE))
    return size / max(time.perf_counter() - began, 1e-6)


def _disk(root: Path) -> tuple[int, int]:
    """Bytes of a cache that don't depend on the rows, and of the shards that do."""
    sizes = {path: path.stat().st_size for path in root.rglob("*") if path.is_file()}
    shards = sum(size for path, size in sizes.items() if path.relative_to(root).parts[0] == "shards")
    return sum(sizes.values()) - shards, shards


def _found(builder: Builder, slices: Sequence[Slice] | None) -> int:
    """How many slices are in the cache."""
    names = (shard_name(builder.recipe.digest, part.digest) for part in slices or ())
    return 0 if builder.options.force else sum(map(builder.cache.has_shard, names))
