"""Prepares a sample of the rows in a temporary cache, and scales its tokens, disk, time and memory up to all rows."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from io import BufferedReader
from itertools import chain, cycle, pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from penstock.build.find import Search
from penstock.build.options import OnBadRow, OnDropped, OnMiss, PrepareOptions
from penstock.build.progress import Progress
from penstock.build.run import SMALL_BYTES, Builder
from penstock.load.options import UnknownRegions, ViewOptions
from penstock.load.view import View
from penstock.prepare.sources.chunks import Compression, decompressed
from penstock.prepare.sources.joined import RUN_FILES
from penstock.prepare.sources.kinds import UTF8_BOM, FileKind
from penstock.prepare.sources.reading import KeepData, read_rows, scan, trim
from penstock.prepare.sources.remote import ObjectPath, SourcePath
from penstock.prepare.sources.slices import SLICE_SIZES, Columns, Slice, SourceFile, identity
from penstock.prepare.sources.source_set import SourceSet
from penstock.store.dataset import Dataset
from penstock.store.manifest import shard_name

# ---- sample ----------------------------------------------------------------------------------------------------------
# A seeded sample of the rows of a build, with an estimate of how many there are.
#
# From plain JSON lines it takes blocks at random places and reads nothing else. From other kinds of files it takes a
# run of rows out of each slice; large ones are read only up to a limit, so their beginning stands for the rest. Every
# row is equally likely to be taken, up to the size of a block.


SAMPLE_BYTES = 32 << 20
BLOCK_BYTES = 256 << 10
CUT_BYTES = 512 << 20  # at most, of the rows of files that can't be read at random places
SHARE_OF_SLICE = 4  # in large files, a quarter of each slice is kept for the sample

Known = Mapping[int, tuple[Slice, ...]]


class Limits(NamedTuple):
    """What limits the rows that are read."""

    max_row_bytes: int
    columns: Columns


@dataclass(slots=True)
class RowSample:
    """Rows in the order of the sources, and estimates for all rows. Sizes include one byte per row."""

    rows: list[bytes]
    oversize: float  # rows over the size limit, in all
    total_rows: float
    total_bytes: float
    is_everything: bool  # nothing was left out

    @property
    def bytes(self) -> int:
        return sum(map(len, self.rows)) + len(self.rows)


class _Run(NamedTuple):
    """Consecutive rows, and the bytes of all the rows that they stand for."""

    rows: list[bytes]
    stands_for: float


@dataclass(slots=True)
class _Stratum:
    """Runs of rows from one file, and estimates for all its rows."""

    runs: list[_Run] = field(default_factory=list)
    oversize: float = 0
    rows: float = 0
    bytes: float = 0
    is_everything: bool = True

    def scale(self, by: float) -> None:
        """Lets what was read stand for a larger file."""
        self.rows, self.bytes, self.oversize = self.rows * by, self.bytes * by, self.oversize * by
        self.runs = [_Run(run.rows, run.stands_for * by) for run in self.runs]


def sample_rows(sources: SourceSet, known: Known, limits: Limits, seed: int = 0) -> RowSample:
    """Samples the selected rows of the sources. `known` has the slices of files that were cut before."""
    choose = random.Random(seed)  # noqa: S311
    if sources.is_whole:
        sizes = [identity(file.path).size for file in sources.files]
        share = [size / max(1, sum(sizes)) for size in sizes]
        strata = [
            _blocks(file, size, part * SAMPLE_BYTES, choose, limits)
            if file.kind is FileKind.JSONL
            else _beginning(file, size, part * CUT_BYTES, choose, limits)
            for file, size, part in zip(sources.files, sizes, share, strict=True)
        ]
        for file, stratum in zip(sources.files, strata, strict=True):
            if file.ordinal in known:
                stratum.rows = sum(part.rows for part in known[file.ordinal])
    else:
        selected = sources.slices(max_row_bytes=limits.max_row_bytes, known=known, keep=KeepData.STREAMED)
        strata = [_runs(sources.files, selected, choose, limits)]
    return _joined(strata, choose)


def _joined(strata: list[_Stratum], choose: random.Random) -> RowSample:
    """Takes the same share of what each run stands for."""
    total = sum(stratum.bytes for stratum in strata)
    share = min(1.0, SAMPLE_BYTES / max(1.0, total))
    return RowSample(
        rows=[row for stratum in strata for run in stratum.runs for row in _part(run, share, choose)],
        oversize=sum(stratum.oversize for stratum in strata),
        total_rows=sum(stratum.rows for stratum in strata),
        total_bytes=total,
        is_everything=share == 1.0 and all(stratum.is_everything for stratum in strata),
    )


def _part(run: _Run, share: float, choose: random.Random) -> Iterator[bytes]:
    """The same share of each block of a run, from a random place in it, so that all take this share in all."""
    size = _size(run.rows)
    share = min(1.0, share * run.stands_for / max(1, size))
    blocks = min(len(run.rows), -(-size // BLOCK_BYTES))
    for number in range(blocks):
        low, high = (len(run.rows) * edge // blocks for edge in (number, number + 1))
        count = round((high - low) * share)
        first = choose.randint(low, high - count)
        yield from run.rows[first : first + count]


def _size(rows: list[bytes]) -> int:
    return sum(map(len, rows)) + len(rows)


# ---- plain JSON lines


def _blocks(file: SourceFile, size: int, wanted: float, choose: random.Random, limits: Limits) -> _Stratum:
    """Rows that start in one of several blocks, one at a random place of each equal part of the file."""
    count = max(1, round(wanted / BLOCK_BYTES))
    block = min(BLOCK_BYTES, -(-size // count))
    found = _Stratum(is_everything=block * count >= size)
    seen = rows = row_bytes = oversize = 0
    for number in range(count):
        low, high = size * number // count, size * (number + 1) // count
        start = low if found.is_everything else choose.randint(low, max(low, high - block))
        stop = high if found.is_everything else min(high, start + block)
        run, too_large = _lines(file, start, stop, limits)
        seen += stop - start
        rows += len(run)
        row_bytes += _size(run)
        oversize += too_large
        found.runs.append(_Run(run, _size(run)))
    found.rows, found.bytes, found.oversize = rows + oversize, row_bytes, oversize
    found.scale(size / max(1, seen))
    return found


def _lines(file: SourceFile, start: int, stop: int, limits: Limits) -> tuple[list[bytes], int]:
    """The rows that start in a range of bytes, and how many more are over the size limit."""
    rows: list[bytes] = []
    too_large = 0
    with _seekable(file.path) as text:
        if start:
            text.seek(start - 1)
            _skip_line(text)
        else:
            text.seek(len(UTF8_BOM) if text.read(len(UTF8_BOM)) == UTF8_BOM else 0)
        while text.tell() < stop and (line := text.readline(limits.max_row_bytes + 2)):
            row = line.removesuffix(b"\n").removesuffix(b"\r")
            if len(row) > limits.max_row_bytes:
                too_large += 1
                if not line.endswith(b"\n"):
                    _skip_line(text)
            elif row.strip():
                rows.append(row)
    return rows, too_large


def _seekable(path: SourcePath) -> BinaryIO:
    return BufferedReader(path.open_range(), BLOCK_BYTES) if isinstance(path, ObjectPath) else path.open("rb")


def _skip_line(text: BinaryIO) -> None:
    while (part := text.readline(BLOCK_BYTES)) and not part.endswith(b"\n"):
        pass


# ---- other kinds


def _beginning(file: SourceFile, size: int, most: float, choose: random.Random, limits: Limits) -> _Stratum:
    """Runs of rows from the slices of a file, as far as it is read."""
    seen = 0.0

    def slices() -> Iterator[Slice]:
        nonlocal seen
        for part in scan(file, max_row_bytes=limits.max_row_bytes, keep=KeepData.STREAMED):
            yield part
            seen = part.end
            if seen > max(most, SAMPLE_BYTES):
                return
        seen = 0.0  # of the whole file

    found = _runs((file,), slices(), choose, limits)
    if seen:
        found.scale(size / _on_disk(file, seen))
        found.is_everything = False
    return found


def _on_disk(file: SourceFile, end: float) -> float:
    """The place in the file of a place in its text."""
    if file.kind.compression is Compression.NONE:
        return end
    with file.path.open("rb", buffering=0) as packed:
        left = end
        for chunk in decompressed(packed, file.name, file.kind.compression):
            left -= len(chunk)
            if left <= 0:
                break
        return packed.tell()


def _runs(files: Sequence[SourceFile], slices: Iterable[Slice], choose: random.Random, limits: Limits) -> _Stratum:
    """The rows of each slice: all of them while there are few, then a quarter, from a random place."""
    found = _Stratum()
    paths = {file.ordinal: file.path for file in files}
    for part in slices:
        path = paths[part.file]
        is_small = found.bytes + part.size <= SHARE_OF_SLICE * SAMPLE_BYTES
        count = part.rows if is_small else -(-part.rows // SHARE_OF_SLICE)
        first = choose.randint(0, part.rows - count)
        taken = part if count == part.rows else trim(part, path, first, first + count)
        read = read_rows(taken, path, data=taken.data, max_row_bytes=limits.max_row_bytes, columns=limits.columns)
        rows = [row for number, row in enumerate(read.rows) if number not in read.oversize]
        scale = part.rows / count
        found.runs.append(_Run(rows, _size(rows) * scale))
        found.rows += part.rows
        found.bytes += found.runs[-1].stands_for
        found.oversize += len(read.oversize) * scale
        found.is_everything &= count == part.rows
    return found


# ---- predict ---------------------------------------------------------------------------------------------------------


USUAL_SPEED = 25e6  # bytes per second, where one slice is all there is
MANY_SLICES = 200  # above this many more slices than in the sample, the cost of a slice is measured
FEW_FILES, MORE_FILES = 4, RUN_FILES - 1  # of one row each, to measure it; more would be joined
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
    search = builder.search
    workers = builder.progress.workers if options.workers == "auto" else int(options.workers)  # here or elsewhere
    slices = search.finder.known()
    limits = Limits(options.max_row_bytes, search.recipe.mapping.read_columns)
    loaded = time.monotonic()
    sample = sample_rows(search.sources, search.finder.known_files, limits)
    seconds_to_read = time.monotonic() - loaded
    with tempfile.TemporaryDirectory(prefix="penstock-estimate-") as folder:
        file = Path(folder, "sample.jsonl")
        first = search.first_rows() if _is_text(search) and not sample.is_everything else []  # decide the format
        file.write_bytes(b"".join(map(_line, chain(first, sample.rows))))
        watch = _Watch()
        outcome = Builder([file], _for_sample(options, Path(folder, "cache")), watch, tokenizer).run()
        elapsed = time.monotonic() - watch.began
        cut_speed = _cut_speed(file)
        trained = _trained(outcome.dataset)
        fixed, growing = _disk(outcome.dataset.cache.root)
        more_slices = max(0, _slice_count(search, slices) - len(outcome.dataset.shards))
        slice_seconds, slice_bytes = 0.0, 0.0
        if more_slices > MANY_SLICES:
            slice_seconds, slice_bytes = _slice_cost(sample.rows, options, tokenizer, Path(folder))
    ledger, done = outcome.dataset.ledger, outcome.progress
    prepared = done.bytes + ledger.rows  # with one byte per row, as the sample counts them
    scale = 1.0 if sample.is_everything else sample.total_bytes / max(1, prepared)
    speed = watch.speed()
    reading = seconds_to_read / max(1, prepared) if not _is_plain(search) else 0.0
    idle = max(0.0, elapsed - done.bytes / speed) + loaded - began
    found = _found(search, slices)
    left = sample.total_bytes * (1 - (found / len(slices) if slices else 0))
    busy = max(left * (1 / speed + reading) / (workers * nodes), sample.total_bytes / cut_speed)
    at_once = workers * nodes if sample.total_bytes > SMALL_BYTES else 1
    busy += more_slices * slice_seconds * (left / max(1, sample.total_bytes)) / at_once
    return Estimate(
        rows=round(sample.total_rows),
        rejected=round(sum(ledger.rejected.values()) * scale + sample.oversize),
        rejected_kinds={kind: round(count * scale) for kind, count in ledger.rejected.items()},
        examples=round(ledger.examples * scale),
        tokens=round(ledger.tokens * scale),
        trained=round(trained * scale),
        trained_share=trained / max(1, ledger.tokens),
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
        sampled_rows=ledger.rows,
        sampled_bytes=done.bytes,
        warnings=outcome.warnings,
    )


def _slice_count(search: Search, slices: Sequence[Slice] | None) -> int:
    """How many slices there are, or about how many: at least one of each file."""
    if slices is not None:
        return len(slices)
    sizes = (identity(file.path).size for file in search.sources.files)
    return sum(max(1, round(size / SLICE_SIZES.mean)) for size in sizes) if search.sources.is_whole else 0


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


def _is_text(search: Search) -> bool:
    return all(file.kind.is_text for file in search.sources.files)


def _is_plain(search: Search) -> bool:
    return all(file.kind is FileKind.JSONL for file in search.sources.files)


def _cut_speed(file: Path) -> float:
    """Bytes per second at which a process finds slices."""
    began = time.perf_counter()
    size = sum(part.size for part in scan(SourceFile(0, file, FileKind.JSONL, file.name), keep=KeepData.NONE))
    return size / max(time.perf_counter() - began, 1e-6)


def _trained(dataset: Dataset) -> int:
    """Tokens that the default view trains."""
    return View(dataset, ViewOptions(regions_unknown=UnknownRegions.DROP)).ledger.trained


def _disk(root: Path) -> tuple[int, int]:
    """Bytes of a cache that don't depend on the rows, and of the shards that do."""
    sizes = {path: path.stat().st_size for path in root.rglob("*") if path.is_file()}
    shards = sum(size for path, size in sizes.items() if path.relative_to(root).parts[0] == "shards")
    return sum(sizes.values()) - shards, shards


def _found(search: Search, slices: Sequence[Slice] | None) -> int:
    """How many slices are in the cache."""
    names = (shard_name(search.recipe.digest, part.digest) for part in slices or ())
    return 0 if search.options.force else sum(map(search.cache.has_shard, names))
