"""A seeded sample of the rows of a build, with an estimate of how many there are.

From plain JSON lines it takes blocks at random places and reads nothing else. From other kinds of files it takes a run
of rows out of each slice; large ones are read only up to a limit, so their beginning stands for the rest. Every row is
equally likely to be taken, up to the size of a block.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from typing import BinaryIO, NamedTuple

from penstock.sources import KeepData, ObjectPath, Slice, SourceFile, SourcePath, SourceSet, identity, read_rows
from penstock.sources.kinds import UTF8_BOM, FileKind
from penstock.sources.reading import scan, trim
from penstock.sources.slices import Columns
from penstock.sources.text.chunks import Compression, decompressed

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
