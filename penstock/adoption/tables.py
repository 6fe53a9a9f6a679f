"""Reads tokenized rows from tables: `save_to_disk` folders, Parquet and JSON lines with the columns trainers use.

Ids are in `input_ids` or `tokens`, the loss mask in `labels` (-100 for untrained tokens) or one of the mask columns.
Packed rows (`seq_lengths`, `seq_start_id`) are unpacked. Pairs are `prompt_ids`, `chosen_ids` and `rejected_ids`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.adoption.chunk import Chunk
from penstock.arrays import Int64
from penstock.errors import SourceError, UsageError
from penstock.view.example import IGNORED
from penstock.view.runs import Float32

ROWS: Final = 1024  # per shard
IDS: Final = ("input_ids", "tokens")
MASKS: Final = ("loss_weights", "labels", "loss_mask", "assistant_masks", "completion_mask")


def arrow_tables(folder: Path) -> Iterator[pa.Table]:
    """Yields the rows of a `save_to_disk` folder, memory-mapped."""
    state = orjson.loads((folder / "state.json").read_bytes())
    for entry in state["_data_files"]:
        with pa.memory_map(str(folder / entry["filename"])) as mapped:
            table = pa.ipc.open_stream(mapped).read_all()
        for first in range(0, len(table), ROWS):
            yield table.slice(first, ROWS)


def parquet_tables(paths: Iterable[Path]) -> Iterator[pa.Table]:
    """Yields the rows of Parquet files in batches."""
    for path in paths:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS):
                yield pa.Table.from_batches([batch])


def jsonl_tables(paths: Iterable[Path]) -> Iterator[pa.Table]:
    """Yields the rows of JSON lines files in batches; an invalid line is an error that names it."""
    for path in paths:
        with path.open("rb") as file:
            lines = enumerate(file, 1)
            while batch := list(islice(lines, ROWS)):
                yield pa.Table.from_pylist([_parsed(path, number, line) for number, line in batch if line.strip()])


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise SourceError(f"{path}:{number}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise SourceError(f"{path}:{number}: a line must hold a JSON object")
    return row


def table_chunks(where: str, tables: Iterable[pa.Table], mask: str | None) -> Iterator[Chunk]:
    """Yields a chunk per table, skipping empty ones."""
    first_row = 0
    for table in tables:
        if len(table):
            yield (
                _pairs(where, first_row, table)
                if "chosen_ids" in table.column_names
                else _singles(where, first_row, table, mask)
            )
        first_row += len(table)


def _column(where: str, table: pa.Table, name: str) -> tuple[Any, Int64]:
    """The concatenated values of a list column, and the length of each list."""
    column = table.column(name).combine_chunks()
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    if not pa.types.is_list(column.type) and not pa.types.is_large_list(column.type):
        raise SourceError(f"{where}: the column {name!r} is {column.type}, not a list per row.")
    if column.null_count or column.flatten().null_count:
        raise SourceError(f"{where}: the column {name!r} has missing values.")
    lengths = np.diff(column.offsets.to_numpy()).astype(np.int64)
    return column.flatten().to_numpy(zero_copy_only=False), lengths


def _singles(where: str, first_row: int, table: pa.Table, mask: str | None) -> Chunk:
    names = table.column_names
    ids_name = next((name for name in IDS if name in names), None)
    if ids_name is None:
        raise SourceError(
            f"{where}: no column {' or '.join(IDS)}, so its rows are not tokenized. Columns: {', '.join(names)}. "
            "Use `penstock prepare` for conversations."
        )
    ids, row_lengths = _column(where, table, ids_name)
    ids = ids.astype(np.int64)
    weights = _weights(where, first_row, table, ids, row_lengths, mask)
    lengths, owners = _sequences(where, table, row_lengths)
    return Chunk(where, first_row, len(table), ids, lengths, owners, weights, None)


def _sequences(where: str, table: pa.Table, row_lengths: Int64) -> tuple[Int64, Int64]:
    """The lengths of all sequences, and the row of each; packed rows have several."""
    rows = np.arange(len(row_lengths))
    if "seq_lengths" in table.column_names:
        lengths, counts = _column(where, table, "seq_lengths")
        lengths = lengths.astype(np.int64)
    elif "seq_start_id" in table.column_names:
        starts, counts = _column(where, table, "seq_start_id")
        begins = np.cumsum(row_lengths) - row_lengths
        lengths = np.diff(np.append(starts + begins.repeat(counts), row_lengths.sum()))
    else:
        return row_lengths, rows
    owners = rows.repeat(counts)
    if (np.bincount(owners, weights=lengths, minlength=len(rows)) != row_lengths).any():
        raise SourceError(f"{where}: the lengths of packed sequences do not add up to the lengths of their rows.")
    return lengths, owners


def mask_column(where: str, names: list[str], chosen: str | None) -> str | None:
    """The column with the loss mask."""
    if chosen is not None:
        if chosen not in names:
            raise UsageError(f"--mask {chosen}: {where} has no such column. Columns: {', '.join(names)}.")
        return chosen
    found = [name for name in MASKS if name in names]
    if not found or found[0] in ("loss_weights", "labels") or len(found) == 1:
        return found[0] if found else None
    raise UsageError(f"{where} has several masks ({', '.join(found)}). Choose one with --mask.")


def _weights(
    where: str, first_row: int, table: pa.Table, ids: Int64, row_lengths: Int64, chosen: str | None
) -> Float32 | None:
    """The loss weight of each token; None if there is no mask column."""
    name = mask_column(where, table.column_names, chosen)
    if name is None:
        return None
    values, lengths = _column(where, table, name)
    if "num_actions" in table.column_names:  # SkyRL's mask covers the end of a row
        values, lengths = _widened(values, lengths, row_lengths), row_lengths
    wrong = np.flatnonzero(lengths != row_lengths)
    if len(wrong):
        row = int(wrong[0])
        raise SourceError(
            f"{where}: row {first_row + row} has {row_lengths[row]} ids but {lengths[row]} entries of {name!r}."
        )
    if name == "labels":
        return _labelled(where, first_row, ids, values, row_lengths)
    if "seq_start_id" in table.column_names:  # Megatron's mask is for predictions: shifted by one token
        values = np.append(0, values[:-1])
        values[np.cumsum(row_lengths)[:-1]] = 0
    return np.asarray(values, np.float32)


def _widened(values: Any, lengths: Int64, row_lengths: Int64) -> Any:
    wide = np.zeros(int(row_lengths.sum()), values.dtype)
    ends = np.cumsum(row_lengths)
    places = np.arange(len(values)) + np.repeat(ends - np.cumsum(lengths), lengths)
    wide[places] = values
    return wide


def _labelled(where: str, first_row: int, ids: Int64, labels: Any, row_lengths: Int64) -> Float32:
    trained = labels != IGNORED
    wrong = np.flatnonzero(trained & (labels != ids))
    if len(wrong):
        row = int(np.searchsorted(np.cumsum(row_lengths), wrong[0], side="right"))
        raise SourceError(
            f"{where}: row {first_row + row}: token {ids[wrong[0]]} has the label {labels[wrong[0]]}. "
            "Labels must equal the ids or be -100; they must not be shifted."
        )
    return np.asarray(trained, np.float32)


def _pairs(where: str, first_row: int, table: pa.Table) -> Chunk:
    """A chunk of pairs: for each row, the chosen sequence and then the rejected one."""
    prompts, prompt_lengths = _column(where, table, "prompt_ids")
    prompt_ends = np.cumsum(prompt_lengths)
    ids, weights, lengths = [], [], []
    sides = []
    for side in ("chosen", "rejected"):
        answers, answer_lengths = _column(where, table, f"{side}_ids")
        counted = np.ones(len(answers), np.float32)
        for name in (f"{side}_weights", f"{side}_mask"):
            if name in table.column_names:
                counted = _column(where, table, name)[0].astype(np.float32)
                break
        sides.append((answers, np.cumsum(answer_lengths), counted))
    for row in range(len(table)):
        prompt = prompts[prompt_ends[row] - prompt_lengths[row] : prompt_ends[row]]
        for answers, ends, counted in sides:
            own = slice(int(ends[row - 1]) if row else 0, int(ends[row]))
            ids += [prompt, answers[own]]
            weights += [np.zeros(len(prompt), np.float32), counted[own]]
            lengths.append(len(prompt) + own.stop - own.start)
    return Chunk(
        where,
        first_row,
        len(table),
        np.concatenate(ids).astype(np.int64),
        np.array(lengths, np.int64),
        np.arange(len(table)).repeat(2),
        np.concatenate(weights),
        prompt_lengths.repeat(2),
    )
