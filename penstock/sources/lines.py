"""JSON lines: chunks of text in, runs of rows out.

A row is a line without its line end (\\n or \\r\\n), exactly as it stands in the file. Blank lines and a BOM at the
file's start are no rows. What comes out does not depend on where chunks end. Cost: about 2 GB/s on lines of 1 KB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.native import native
from penstock.sources.kinds import UTF8_BOM
from penstock.sources.text_rows import BLANK, Giant, PartialRow, Run

HEAD_BYTES = 1 << 12


def line_runs(chunks: Iterable[bytes], largest: int, limit: int, *, start: int = 0) -> Iterator[Run | Giant]:
    """The rows of JSON lines, which stand at `start` of their file.

    A row over `largest` bytes that crosses the end of a chunk comes as a giant.
    """
    partial = PartialRow(largest, limit)
    position = start  # where the line in `partial` starts
    for chunk, skipped in _without_bom(chunks) if not start else ((chunk, 0) for chunk in chunks):
        position += skipped
        first, stop = 0, chunk.rfind(b"\n") + 1
        if stop and partial.size:
            first = chunk.find(b"\n") + 1
            partial.add(chunk[: first - 1])
            end = position + partial.size + 1
            yield _finished(partial, position, end)
            partial, position = PartialRow(largest, limit), end
        if first < stop:
            yield _run(chunk[first:stop], position)
            position += stop - first
        partial.add(chunk[stop:])
    if partial.size:
        yield _finished(partial, position, position + partial.size)


def _run(text: bytes, start: int) -> Run:
    """The rows of whole lines, which stand at `start`."""
    end = start + len(text)
    head = text[:HEAD_BYTES]
    if b"\r" in text or 2 * head.count(b"\n") > len(head):  # mostly blank lines: don't make a row of each
        return _cleaned(text, start, end)
    rows = text.split(b"\n") if native is None else native.split_lines(text)
    rows.pop()  # what follows the last line end
    if min(rows) < b"!":  # a blank line, or an indented one
        return _cleaned(text, start, end)
    return Run(rows, start, end, len(rows), memoryview(text))


def _cleaned(text: bytes, start: int, end: int) -> Run:
    """The same for text with blank lines or \\r. Blank lines cost no more than their bytes."""
    import numpy as np  # which hits do without

    data = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(data == ord("\n")) + 1
    written = np.ones(256, np.int32)
    written[list(BLANK + b"\n")] = 0
    before = np.concatenate(([0], np.cumsum(written[data], dtype=np.int32)[ends - 1]))
    filled = np.flatnonzero(np.diff(before))
    starts = np.concatenate(([0], ends))[filled]
    places = zip(starts.tolist(), (ends[filled] - 1).tolist(), strict=True)
    return Run(
        [text[first:stop].removesuffix(b"\r") for first, stop in places],
        start,
        end,
        len(ends),
        starts=(starts + start).tolist(),
        ends=(ends[filled] + start).tolist(),
        numbers=filled.tolist(),
    )


def _without_bom(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
    """Chunks, each with the number of bytes skipped before it. The BOM may come in pieces."""
    begin: bytes | None = b""
    for chunk in chunks:
        if begin is None:
            yield chunk, 0
            continue
        begin += chunk
        if len(begin) >= len(UTF8_BOM):
            text = begin.removeprefix(UTF8_BOM)
            yield text, len(begin) - len(text)
            begin = None
    if begin:
        yield begin, 0


def _finished(partial: PartialRow, start: int, end: int) -> Run | Giant:
    if partial.is_blank:
        return Run([], start, end, 1)
    row = partial.finish(start, end, b"\r")
    return row if isinstance(row, Giant) else Run([row], start, end, 1, ends=[end])
