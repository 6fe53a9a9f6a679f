"""CSV and TSV: chunks of text in, runs of rows out, each row a JSON object under the names of the header.

Cells are strings; an empty one is null. A cell that holds a JSON list of messages (objects with `role` or `from`)
becomes that list. A row with more or fewer cells than the header has stays a list, which is refused where rows are
read, so that it can be set aside like any other bad row. Quotes as RFC 4180 has them. Cost: about 40 MB/s.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from penstock.errors import SourceError
from penstock.sources.kinds import UTF8_BOM
from penstock.sources.text.rows import RowRun

RUN_ROWS = 256


def cell_runs(chunks: Iterable[bytes], name: str, delimiter: str, limit: int) -> Iterator[RowRun]:
    """The rows of a delimited file. `limit` bounds a cell, so that a missing quote does not read the rest as one."""
    csv.field_size_limit(max(csv.field_size_limit(), limit))
    reader = csv.reader(_lines(chunks, name), delimiter=delimiter, strict=True)
    rows: list[bytes] = []
    position = read = 0
    try:
        header = _header(next(reader, []), name, delimiter)
        for cells in reader:
            if not cells:
                continue
            read += 1
            rows.append(_row(header, cells))
            if len(rows) == RUN_ROWS:
                yield (run := _run(rows, position))
                position, rows = run.end, []
    except csv.Error as error:
        raise SourceError(
            f"{name}, line {reader.line_num}, after row {read}: {error}. Is a quote missing there? "
            'Inside a quoted cell, a quote is written twice ("").'
        ) from error
    if rows:
        yield _run(rows, position)


def _run(rows: list[bytes], start: int) -> RowRun:
    text = b"".join(row + b"\n" for row in rows)
    return RowRun(rows, start, start + len(text), len(rows), memoryview(text))


def _header(names: list[str], name: str, delimiter: str) -> list[str]:
    twice = [column for column in names if names.count(column) > 1]
    if not names or twice or not all(names):
        what = f"names {twice[0]!r} twice" if twice else "has an empty name" if names else "is missing"
        raise SourceError(f"{name}: the header (line 1) {what}. The first line must name each column once.")
    if len(names) == 1 and any(other in names[0] for other in ",;\t" if other != delimiter):
        raise SourceError(
            f"{name}: the header {names[0]!r} is one name, and the cells are split at {delimiter!r}. "
            "CSV is split at commas, a .tsv file at tabs: rename the file, or write it again."
        )
    return names


def _row(header: list[str], cells: list[str]) -> bytes:
    if len(cells) != len(header):
        return orjson.dumps(cells)
    return orjson.dumps({name: _value(cell) for name, cell in zip(header, cells, strict=True)})


def _value(cell: str) -> Any:
    if cell.startswith("["):
        try:
            found = orjson.loads(cell)
        except orjson.JSONDecodeError:
            return cell
        if found and all(isinstance(m, dict) and ("role" in m or "from" in m) for m in found):
            return orjson.Fragment(cell.replace("\n", "\r"))  # white space in JSON; a row is one line
    return cell or None


def _lines(chunks: Iterable[bytes], name: str) -> Iterator[str]:
    rest = b""
    number = 0
    for chunk in itertools.chain(chunks, (b"",)):
        *whole, rest = (rest + chunk).split(b"\n") if chunk or not rest else (rest, b"")
        for line in whole:
            number += 1
            text = line.removeprefix(UTF8_BOM) if number == 1 else line
            try:
                yield text.decode() + "\n"
            except UnicodeDecodeError as error:
                raise SourceError(
                    f"{name}, line {number}: byte {error.start} (0x{text[error.start]:02x}) is not valid UTF-8. "
                    "Write the file as UTF-8."
                ) from error
