"""Reads tokenized rows from tables: Arrow, Parquet and JSON with the columns trainers use.

Ids are in `input_ids` or `tokens`, the loss mask in `labels` (-100 for untrained tokens) or one of the mask columns.
Packed rows (`seq_lengths`, `seq_start_id`) are unpacked. Pairs are `prompt_ids`, `chosen_ids` and `rejected_ids`.
Files are read by the readers of `prepare`, so a damaged file gives the same error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from penstock.arrays import Float32, Int64
from penstock.errors import SourceError, UsageError
from penstock.exchange.adopt_raw import Chunk, RowPlaces, checked_weights, row_at
from penstock.load.example import IGNORED
from penstock.prepare.sources.arrow import arrow_head
from penstock.prepare.sources.columnar import reason_of
from penstock.prepare.sources.kinds import FileKind
from penstock.prepare.sources.parquet import parquet_head
from penstock.prepare.sources.slices import MAX_ROW_BYTES, SLICE_SIZES, SourceFile
from penstock.prepare.sources.text_rows import HugeRow
from penstock.prepare.sources.text_slices import text_runs

ROWS: Final = 1024  # per shard
IDS: Final = ("input_ids", "tokens")
MASKS: Final = ("loss_weights", "labels", "loss_mask", "assistant_masks", "completion_mask")
SIDES: Final = ("chosen", "rejected")
PAIRS: Final = tuple(f"{side}_{what}" for side in SIDES for what in ("ids", "mask", "weights"))
NAMES: Final = frozenset((*IDS, *MASKS, "num_actions", "seq_lengths", "seq_start_id", "prompt_ids", *PAIRS))


class _Lists(NamedTuple):
    """The concatenated values of a list column, and the length of each list."""

    values: npt.NDArray[Any]
    lengths: Int64


def table_chunks(files: Iterable[SourceFile], mask: str | None) -> Iterator[Chunk]:
    """Yields the rows of files in chunks of at most `ROWS`."""
    names = NAMES | {mask} if mask is not None else NAMES
    first_row = 0
    for file in files:
        for places, table in _tables(file, names):
            is_pairs = "chosen_ids" in table.column_names
            yield _pairs(places, first_row, table) if is_pairs else _singles(places, first_row, table, mask)
            first_row += len(table)


def _tables(file: SourceFile, names: frozenset[str]) -> Iterator[tuple[RowPlaces, pa.Table]]:
    """The rows of a file; columns other than `names` have no values."""
    if file.kind.delimiter:
        raise SourceError(f"{file.name}: {file.kind} can't be adopted. Use Parquet, Arrow or JSON lines.")
    if file.kind.is_text:
        yield from _json_tables(file, names)
        return
    batches = parquet_head(file, names) if file.kind is FileKind.PARQUET else arrow_head(file, names)
    first = 0
    for table in _regrouped(batches):
        try:
            table.validate(full=True)
        except pa.ArrowException as error:
            raise SourceError(f"{file.name}: damaged after row {first}: {reason_of(error)}. Write it again.") from error
        yield RowPlaces(file.name, first), table
        first += len(table)


def _regrouped(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Tables of `ROWS` rows, whatever the size of the batches."""
    held, rows = list[pa.RecordBatch](), 0
    for batch in batches:
        first = 0
        while first < batch.num_rows:
            piece = batch.slice(first, ROWS - rows)
            held.append(piece)
            first, rows = first + piece.num_rows, rows + piece.num_rows
            if rows == ROWS:
                yield pa.Table.from_batches(held)
                held, rows = [], 0
    if held:
        yield pa.Table.from_batches(held)


def _json_tables(file: SourceFile, names: frozenset[str]) -> Iterator[tuple[RowPlaces, pa.Table]]:
    rows, first = _numbered(file), 0
    while group := list(islice(rows, ROWS)):
        numbers = [number for number, _ in group]
        places = RowPlaces(file.name, first, numbers if file.kind.has_lines else None)
        parsed = [_parsed(places, row, text) for row, (_, text) in enumerate(group)]
        columns = {
            name: _json_column(places, name, [row.get(name) for row in parsed])
            if name in names
            else pa.nulls(len(parsed))
            for name in dict.fromkeys(chain.from_iterable(parsed))
        }
        yield places, pa.table(columns) if columns else pa.table({"": pa.nulls(len(parsed))})
        first += len(group)


def _numbered(file: SourceFile) -> Iterator[tuple[int, bytes]]:
    """The rows of a text file with their line numbers."""
    line = 0
    for run in text_runs(file, MAX_ROW_BYTES, SLICE_SIZES.largest):
        if isinstance(run, HugeRow):
            line += 1
            if run.data is None:
                raise SourceError(f"{file.name}:{line}: a row of {run.size:,} bytes; the limit is {MAX_ROW_BYTES:,}.")
            yield line, run.data
            continue
        yield from ((line + run.line_of(index) + 1, row) for index, row in enumerate(run.rows))
        line += run.lines


def _parsed(places: RowPlaces, number: int, text: bytes) -> dict[str, Any]:
    try:
        row = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise SourceError(f"{places.of(number)}: not valid JSON: {error}.") from error
    if not isinstance(row, dict):
        raise SourceError(f"{places.of(number)}: a row must be a JSON object.")
    return row


def _json_column(places: RowPlaces, name: str, values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        kinds = [_kinds(value) for value in values]
        row = next((row for row, found in enumerate(kinds) if found != kinds[0] or len(found) > 1), 0)
        shown = " and ".join(sorted(kinds[row]))
        raise SourceError(
            f"{places.of(row)}: {name!r} holds {shown}, which does not fit the rows before it or is not a list of "
            "numbers of one type."
        ) from error


def _kinds(value: object) -> set[str]:
    return {type(item).__name__ for item in value} if isinstance(value, list) else {type(value).__name__}


def _lists(places: RowPlaces, table: pa.Table, name: str) -> _Lists:
    """A column with one list per row, without missing values."""
    column = table.column(name).combine_chunks()
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise SourceError(f"{places.of(row)}: no value in the column {name!r}.")
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    if not pa.types.is_list(column.type) and not pa.types.is_large_list(column.type):
        raise SourceError(f"{places.file}: the column {name!r} is {column.type}, not a list per row.")
    lengths, flat = np.diff(column.offsets.to_numpy()).astype(np.int64), column.flatten()
    if flat.null_count:
        position = np.flatnonzero(flat.is_null().to_numpy(zero_copy_only=False))[0]
        raise SourceError(f"{places.of(row_at(lengths, position))}: a missing value in the column {name!r}.")
    if len(flat) and not (pa.types.is_integer(flat.type) or pa.types.is_floating(flat.type) or flat.type == pa.bool_()):
        raise SourceError(f"{places.file}: the column {name!r} holds {flat.type}, not numbers.")
    return _Lists(flat.to_numpy(zero_copy_only=False) if len(flat) else np.empty(0, np.int64), lengths)


def _integers(places: RowPlaces, table: pa.Table, name: str) -> _Lists:
    """A column of lists of integers."""
    values, lengths = _lists(places, table, name)
    if values.dtype.kind == "f":
        fractions = np.flatnonzero(values != np.floor(values))
        position = fractions[0] if len(fractions) else 0
        raise SourceError(
            f"{places.of(row_at(lengths, position))}: {name!r} has the value {values[position]:g} of type "
            f"{values.dtype}, and must hold integers. Write it as int32 or int64."
        )
    if values.dtype.kind not in "iu":
        raise SourceError(f"{places.file}: the column {name!r} holds {values.dtype}, and must hold integers.")
    most = np.iinfo(np.int64).max  # unsigned values beyond it are no ids either
    return _Lists((values.clip(max=most) if values.dtype == np.uint64 else values).astype(np.int64), lengths)


def _singles(places: RowPlaces, first_row: int, table: pa.Table, mask: str | None) -> Chunk:
    names = table.column_names
    ids_name = next((name for name in IDS if name in names), None)
    if ids_name is None:
        raise SourceError(
            f"{places.file}: no column {' or '.join(IDS)}, so its rows are not tokenized. Columns: {', '.join(names)}. "
            "Use `penstock prepare` for conversations."
        )
    ids, row_lengths = _integers(places, table, ids_name)
    weights = _weights(places, table, ids, row_lengths, mask)
    lengths, owners = _sequences(places, table, row_lengths)
    return Chunk(places, first_row, len(table), ids, lengths, owners, weights, None)


def _sequences(places: RowPlaces, table: pa.Table, row_lengths: Int64) -> tuple[Int64, Int64]:
    """The lengths of all sequences, and the row of each; packed rows have several."""
    rows = np.arange(len(row_lengths))
    if "seq_lengths" in table.column_names:
        lengths, counts = _integers(places, table, "seq_lengths")
    elif "seq_start_id" in table.column_names:
        starts, counts = _integers(places, table, "seq_start_id")
        begins = np.cumsum(row_lengths) - row_lengths
        lengths = np.diff(np.append(starts + begins.repeat(counts), row_lengths.sum()))
    else:
        return row_lengths, rows
    owners = rows.repeat(counts)
    wrong = np.bincount(owners, weights=lengths, minlength=len(rows)) != row_lengths
    wrong[owners[(lengths < 0) | (lengths > row_lengths[owners])]] = True
    if wrong.any():
        raise SourceError(
            f"{places.of(np.flatnonzero(wrong)[0])}: the lengths of packed sequences do not add up to that of the row."
        )
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


def _weights(places: RowPlaces, table: pa.Table, ids: Int64, row_lengths: Int64, chosen: str | None) -> Float32 | None:
    """The loss weight of each token; None if there is no mask column."""
    name = mask_column(places.file, table.column_names, chosen)
    if name is None:
        return None
    values, lengths = _integers(places, table, name) if name == "labels" else _lists(places, table, name)
    if "num_actions" in table.column_names:  # SkyRL's mask covers the end of a row
        values, lengths = _widened(places, table, name, _Lists(values, lengths), row_lengths), row_lengths
    _check_lengths(places, name, lengths, row_lengths)
    if name == "labels":
        return _labelled(places, ids, values, row_lengths)
    if "seq_start_id" in table.column_names:  # Megatron's mask is for predictions: shifted by one token
        values = np.append(0, values[:-1])
        values[np.cumsum(row_lengths)[:-1]] = 0
    return checked_weights(places, name, values, row_lengths)


def _check_lengths(places: RowPlaces, name: str, lengths: Int64, expected: Int64) -> None:
    wrong = np.flatnonzero(lengths != expected)
    if len(wrong):
        row = int(wrong[0])
        raise SourceError(f"{places.of(row)}: {expected[row]} ids but {lengths[row]} entries of {name!r}.")


def _widened(places: RowPlaces, table: pa.Table, name: str, mask: _Lists, row_lengths: Int64) -> npt.NDArray[Any]:
    """A mask of the last tokens of each row, as one of all tokens."""
    actions = table.column("num_actions").to_pylist()
    wrong = [
        row
        for row, (count, given, most) in enumerate(
            zip(actions, mask.lengths.tolist(), row_lengths.tolist(), strict=True)
        )
        if count != given or given > most
    ]
    if wrong:
        row = wrong[0]
        raise SourceError(
            f"{places.of(row)}: num_actions is {actions[row]}, with {mask.lengths[row]} entries of {name!r} and "
            f"{row_lengths[row]} ids. SkyRL's mask has num_actions entries, for the last ids of the row."
        )
    wide = np.zeros(int(row_lengths.sum()), mask.values.dtype)
    ends = np.cumsum(row_lengths)
    wide[np.arange(len(mask.values)) + np.repeat(ends - np.cumsum(mask.lengths), mask.lengths)] = mask.values
    return wide


def _labelled(places: RowPlaces, ids: Int64, labels: Int64, row_lengths: Int64) -> Float32:
    trained = labels != IGNORED
    wrong = np.flatnonzero(trained & (labels != ids))
    if len(wrong):
        raise SourceError(
            f"{places.of(row_at(row_lengths, wrong[0]))}: token {ids[wrong[0]]} has the label {labels[wrong[0]]}. "
            "Labels must equal the ids or be -100; they must not be shifted."
        )
    return np.asarray(trained, np.float32)


def _pairs(places: RowPlaces, first_row: int, table: pa.Table) -> Chunk:
    """A chunk of pairs: for each row, the chosen sequence and then the rejected one."""
    names = table.column_names
    for needed in ("prompt_ids", "rejected_ids"):
        if needed not in names:
            raise SourceError(f"{places.file}: no column {needed!r} beside 'chosen_ids'. Columns: {', '.join(names)}.")
    prompts = _integers(places, table, "prompt_ids")
    parts = [
        _split(prompts.values, prompts.lengths),
        _split(np.zeros(len(prompts.values), np.float32), prompts.lengths),
    ]
    for side in SIDES:
        answers = _integers(places, table, f"{side}_ids")
        parts += [
            _split(answers.values, answers.lengths),
            _split(_side_weights(places, table, side, answers.lengths), answers.lengths),
        ]
    ids, weights = list[Any](), list[Any]()
    for prompt, zeros, chosen, chosen_weights, rejected, rejected_weights in zip(*parts, strict=True):
        ids += [prompt, chosen, prompt, rejected]
        weights += [zeros, chosen_weights, zeros, rejected_weights]
    lengths = np.array([len(part) for part in ids], np.int64).reshape(-1, 2).sum(axis=1)
    owners = np.arange(len(table)).repeat(2)
    joined = np.concatenate(ids), np.concatenate(weights)
    return Chunk(places, first_row, len(table), joined[0], lengths, owners, joined[1], prompts.lengths.repeat(2))


def _split(values: npt.NDArray[Any], lengths: Int64) -> list[npt.NDArray[Any]]:
    return np.split(values, np.cumsum(lengths)[:-1])


def _side_weights(places: RowPlaces, table: pa.Table, side: str, lengths: Int64) -> Float32:
    """The loss weights of an answer; 1 everywhere if there is no column."""
    for name in (f"{side}_weights", f"{side}_mask"):
        if name in table.column_names:
            given = _lists(places, table, name)
            _check_lengths(places, name, given.lengths, lengths)
            return checked_weights(places, name, given.values, lengths)
    return np.ones(int(lengths.sum()), np.float32)
