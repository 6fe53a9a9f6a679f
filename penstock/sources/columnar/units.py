"""Cuts sequences of units (Parquet row groups, Arrow record batches) into slices.

Small units are joined and cut by content, as rows of text are; a unit larger than the largest slice is divided into
equal row ranges. The digest covers the units' raw bytes and the schema, and for a row range its bounds, so a changed
byte changes all ranges of its unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from blake3 import blake3

from penstock.sources.slices import SLICE_SIZES, Slice, SliceSizes, SourceFile

MIN_ROW_WEIGHT = 256  # bytes; encoded sizes say little about dictionary-encoded rows


class Unit(NamedTuple):
    """A row group or record batch: byte range in the file, rows, decoded size, digest of its bytes."""

    start: int
    end: int
    rows: int
    size: int
    digest: bytes

    @property
    def weight(self) -> int:
        """The size used when cutting slices."""
        return max(self.size if self.rows else 0, self.rows * MIN_ROW_WEIGHT)


def units_digest(schema: str, digests: Iterable[bytes], rows: range | None = None) -> str:
    """The digest of the given rows (None: all) of consecutive units."""
    hasher = blake3(b"penstock units 1\0" + schema.encode() + b"\0")
    for digest in digests:
        hasher.update(digest)
    if rows is not None:
        hasher.update(f"rows {rows.start} to {rows.stop}".encode())
    return "b3-" + hasher.hexdigest()


def cut_units(file: SourceFile, units: Iterable[Unit], schema: str, sizes: SliceSizes = SLICE_SIZES) -> Iterator[Slice]:
    """Yield the slices of a file in order, each as soon as it is complete."""
    pending: list[Unit] = []
    done = row = weight = 0  # units and rows in earlier slices; weight of the pending units
    for unit in units:
        if pending and weight + unit.weight > sizes.largest:
            yield from _slices(file, pending, schema, done, row, sizes)
            done, row, weight, pending = done + len(pending), row + sum(u.rows for u in pending), 0, []
        pending.append(unit)
        weight += unit.weight
        ends_here = int.from_bytes(unit.digest[:8]) < unit.weight * sizes.rate
        if weight >= sizes.smallest and (ends_here or weight > sizes.largest):
            yield from _slices(file, pending, schema, done, row, sizes)
            done, row, weight, pending = done + len(pending), row + sum(u.rows for u in pending), 0, []
    yield from _slices(file, pending, schema, done, row, sizes)


def trim_units(part: Slice, schema: str, units: Sequence[Unit], first: int, stop: int) -> Slice:
    """Rows first:stop of a slice of these units, as a slice."""
    total = sum(unit.rows for unit in units)
    rows = range(part.skip + first, part.skip + stop)
    return replace(
        part,
        first_row=part.first_row + first,
        rows=len(rows),
        size=part.size * len(rows) // part.rows,
        digest=units_digest(schema, (unit.digest for unit in units), None if len(rows) == total else rows),
        skip=rows.start,
    )


def check_units(part: Slice, schema: str, units: Sequence[Unit]) -> bool:
    """Whether the units still match the slice's digest."""
    total = sum(unit.rows for unit in units)
    rows = range(part.skip, part.skip + part.rows)
    return part.digest == units_digest(schema, (unit.digest for unit in units), None if len(rows) == total else rows)


def _slices(
    file: SourceFile, units: list[Unit], schema: str, done: int, first_row: int, sizes: SliceSizes
) -> Iterator[Slice]:
    """One slice of all these units, or several slices of a unit that is too large."""
    rows = sum(unit.rows for unit in units)
    if not rows:
        return
    whole = Slice(
        file=file.ordinal,
        kind=file.kind,
        start=units[0].start,
        end=units[-1].end,
        first_row=first_row,
        rows=rows,
        first_line=None,
        size=sum(unit.size for unit in units),
        digest=units_digest(schema, (unit.digest for unit in units)),
        unit=done,
        units=len(units),
    )
    weight = sum(unit.weight for unit in units)
    pieces = 1 if weight <= sizes.largest else min(rows, -(-weight // sizes.mean))
    for piece in range(pieces):
        first, stop = piece * rows // pieces, (piece + 1) * rows // pieces
        yield whole if pieces == 1 else trim_units(whole, schema, units, first, stop)
