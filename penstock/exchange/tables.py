"""Rows as tables: the columns that trainers expect, and the Arrow or Parquet files that hold them.

Ids and labels are int32, masks int8. Labels are not shifted and are -100 for untrained tokens. The first token of each
sequence in a packed row is never trained, because no token of its own sequence predicts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.arrays import Bool, Int64
from penstock.errors import UsageError
from penstock.exchange.folder import ExportFolder
from penstock.exchange.format import ExportPart, Supports
from penstock.exchange.rows import Block, ExportRows
from penstock.load.example import IGNORED
from penstock.load.packing import ranges
from penstock.load.view import Served

if TYPE_CHECKING:
    import datasets


Columns = dict[str, pa.Array]


def lists(values: npt.NDArray[Any], lengths: Int64, dtype: Any) -> pa.Array:
    """An Arrow array with one list per row."""
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.ascontiguousarray(values, dtype)))


def trained(block: Block, rows: ExportRows) -> Bool:
    """The loss mask; in packed rows without the first token of each sequence."""
    if rows.capacity is None:
        return block.trained
    mask = block.trained.copy()
    mask[block.starts] = False
    return mask


def input_ids(block: Block) -> pa.Array:
    """The token ids of each row."""
    return lists(block.ids, block.row_tokens, np.int32)


def labels(block: Block, rows: ExportRows) -> pa.Array:
    """The id of each trained token, -100 elsewhere."""
    found = np.where(trained(block, rows), block.ids.astype(np.int32), np.int32(IGNORED))
    return lists(found, block.row_tokens, np.int32)


def loss_mask(block: Block, rows: ExportRows) -> pa.Array:
    """1 for trained tokens."""
    return lists(trained(block, rows).view(np.int8), block.row_tokens, np.int8)


def attention_mask(block: Block) -> pa.Array:
    """1 everywhere: rows are not padded."""
    return lists(np.ones(len(block.ids), np.int8), block.row_tokens, np.int8)


def seq_lengths(block: Block) -> pa.Array:
    """The length of each sequence in a packed row."""
    return lists(block.lengths, block.counts, np.int32)


def plain_columns(block: Block, rows: ExportRows) -> Columns:
    """`input_ids` and `labels`; `seq_lengths` for packed rows; `loss_weights` if some are fractions."""
    if rows.is_preference:
        return pair_columns(block)
    columns = {"input_ids": input_ids(block), "labels": labels(block, rows)}
    if rows.capacity is not None:
        columns["seq_lengths"] = seq_lengths(block)
    if block.weights is not None:
        weights = np.where(trained(block, rows), block.weights, 0)
        columns["loss_weights"] = lists(weights, block.row_tokens, np.float32)
    return columns


def pair_columns(block: Block) -> Columns:
    """`prompt_ids`, then `chosen_ids` and `rejected_ids` without the prompt, each with its loss mask."""
    count = len(block.prompts)
    starts, ends = block.starts, np.cumsum(block.lengths)
    tokens, _ = ranges(starts[:count], starts[:count] + block.prompts)
    columns = {"prompt_ids": lists(block.ids[tokens], block.prompts, np.int32)}
    for name, side in (("chosen", slice(0, count)), ("rejected", slice(count, None))):
        tokens, _ = ranges(starts[side] + block.prompts, ends[side])
        lengths = block.lengths[side] - block.prompts
        columns[f"{name}_ids"] = lists(block.ids[tokens], lengths, np.int32)
        columns[f"{name}_mask"] = lists(block.trained[tokens].view(np.int8), lengths, np.int8)
        if block.weights is not None:
            columns[f"{name}_weights"] = lists(block.weights[tokens], lengths, np.float32)
    return columns


class Container(Protocol):
    """A kind of file that holds tables."""

    def name(self, part: ExportPart) -> str:
        """The file name of a part."""
        ...

    def write(self, file: IO[bytes], batches: Iterator[pa.RecordBatch]) -> None:
        """Writes all batches of a part; there is at least one."""
        ...

    def finish(self, parts: list[ExportPart], schema: pa.Schema, digest: str, folder: ExportFolder) -> None:
        """Writes files that describe all parts."""
        ...


class ArrowFolder:
    """The layout of `Dataset.save_to_disk`, written without `datasets`."""

    def name(self, part: ExportPart) -> str:
        """The name that `datasets` uses."""
        return f"data-{part.number:05}-of-{part.of:05}.arrow"

    def write(self, file: IO[bytes], batches: Iterator[pa.RecordBatch]) -> None:
        """Writes an Arrow stream."""
        first = next(batches)
        with pa.ipc.new_stream(file, first.schema) as writer:
            writer.write_batch(first)
            for batch in batches:
                writer.write_batch(batch)

    def finish(self, parts: list[ExportPart], schema: pa.Schema, digest: str, folder: ExportFolder) -> None:
        """Writes `dataset_info.json` and `state.json`."""
        features = {field.name: _feature(field.type) for field in schema}
        info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
        state: dict[str, Any] = {
            "_data_files": [{"filename": self.name(part)} for part in parts],
            "_fingerprint": digest.removeprefix("b3-")[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        for name, value in (("dataset_info.json", info), ("state.json", state)):
            with folder.new(name) as file:
                file.write(orjson.dumps(value, option=orjson.OPT_INDENT_2))


@dataclass(frozen=True, slots=True)
class ParquetFiles:
    """Parquet files in the layout that `load_dataset(FOLDER)` expects."""

    suffix: str = ".parquet"

    def name(self, part: ExportPart) -> str:
        """The name that the Hub uses."""
        return f"data/train-{part.number:05}-of-{part.of:05}{self.suffix}"

    def write(self, file: IO[bytes], batches: Iterator[pa.RecordBatch]) -> None:
        """Writes one row group per block."""
        first = next(batches)
        with pq.ParquetWriter(file, first.schema, compression="zstd", compression_level=1) as writer:
            writer.write_batch(first)
            for batch in batches:
                writer.write_batch(batch)

    def finish(self, parts: list[ExportPart], schema: pa.Schema, digest: str, folder: ExportFolder) -> None:
        """Does nothing: the files describe themselves."""


def _feature(kind: pa.DataType) -> dict[str, Any]:
    """A column's type in the notation of `datasets`."""
    if pa.types.is_list(kind):
        return {"feature": _feature(kind.value_type), "_type": "List"}
    return {"dtype": {"float": "float32"}.get(str(kind), str(kind)), "_type": "Value"}


@dataclass(frozen=True)
class TableFormat:
    """A format that writes rows as a table."""

    columns: Callable[[Block, ExportRows], Columns]
    container: Container
    supports: Supports = Supports()
    check_rows: Callable[[ExportRows], None] | None = None
    part_tokens: int = 1 << 26

    def check(self, rows: ExportRows) -> None:
        """Raises an error for rows that the columns can't express."""
        if self.check_rows is not None:
            self.check_rows(rows)

    def write(
        self, part: ExportPart, blocks: Iterator[Block], rows: ExportRows, folder: ExportFolder
    ) -> dict[str, int]:
        """Writes the part as one file."""
        name = self.container.name(part)
        with folder.new(name) as file:
            self.container.write(file, (self._batch(block, rows) for block in blocks))
            size = file.tell()
        return {name: size}

    def finish(self, parts: list[ExportPart], rows: ExportRows, folder: ExportFolder) -> dict[str, Any]:
        """Writes the container's description files."""
        schema = self._batch(next(rows.blocks(0, 1)), rows).schema
        self.container.finish(parts, schema, rows.served.digest, folder)
        return {"rows": len(rows), "columns": {field.name: str(field.type) for field in schema}}

    def _batch(self, block: Block, rows: ExportRows) -> pa.RecordBatch:
        columns = self.columns(block, rows)
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


# ---- lazy ------------------------------------------------------------------------------------------------------------
#
# A view as a lazy `datasets.Dataset`, which holds row numbers and reads the memory-mapped shards on access.


def lazy_dataset(served: Served, capacity: int | None = None) -> datasets.Dataset:
    """Wraps a view as a dataset with the columns of `--to hf`; trainers need `remove_unused_columns=False`."""
    try:
        import datasets
    except ImportError:
        raise UsageError("to_hf() needs the datasets package. Install it with: pip install 'penstock[hub]'.") from None
    rows = ExportRows(served, capacity=capacity)
    numbers = datasets.Dataset.from_dict({"row": np.arange(len(rows))})
    return numbers.with_transform(_Reader(served, capacity))


class _Reader:
    """Reads the columns of a batch of row numbers; pickles as the view it reads."""

    def __init__(self, served: Served, capacity: int | None) -> None:
        self._arguments = served, capacity
        self._rows = ExportRows(served, capacity=capacity)

    def __call__(self, batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        blocks = [next(self._rows.blocks(row, row + 1)) for row in batch["row"]]
        columns = [plain_columns(block, self._rows) for block in blocks]
        return {name: [found[name][0].values.to_numpy() for found in columns] for name in columns[0]}

    def __reduce__(self) -> tuple[type[_Reader], tuple[Served, int | None]]:
        return _Reader, self._arguments
