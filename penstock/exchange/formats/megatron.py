"""Megatron's indexed dataset, `tokens.bin` and `tokens.idx`; packed rows are written as `nemo`, for fine-tuning.

The loss mask is a second indexed dataset of the same shape, `loss_mask.bin` and `.idx`, with one byte per token. Each
sequence is a document. All offsets are known in advance, so parts can be written in any order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import IO, Any, Final

import numpy as np

from penstock.arrays import Int64
from penstock.exchange.folder import ExportFolder
from penstock.exchange.format import ExportPart, Supports
from penstock.exchange.formats import nemo
from penstock.exchange.rows import Block, ExportRows

CODES: Final = {"uint8": 1, "int32": 4, "uint16": 8}
UINT16_BELOW: Final = 65500  # vocabulary size from which Megatron itself writes int32
CHUNK: Final = 1 << 16


def id_type(largest: int) -> np.dtype[Any]:
    """The dtype Megatron uses for this vocabulary."""
    return np.dtype(np.uint16 if largest + 1 < UINT16_BELOW else np.int32)


class Megatron:
    """One pair of files for the tokens, one for the mask."""

    supports = Supports(packed=True)
    part_tokens = 1 << 24

    def check(self, rows: ExportRows) -> None:
        """Does nothing: all rows are supported."""

    def write(
        self, part: ExportPart, blocks: Iterator[Block], rows: ExportRows, folder: ExportFolder
    ) -> dict[str, int]:
        """Writes this part's range of both .bin files."""
        if rows.capacity is not None:
            return nemo.FORMAT.write(part, blocks, rows, folder)
        dtype, first = id_type(rows.largest_id), part.first_token
        with folder.at("tokens.bin", first * dtype.itemsize) as tokens, folder.at("loss_mask.bin", first) as masks:
            for block in blocks:
                tokens.write(np.ascontiguousarray(block.ids, dtype).data)
                masks.write(np.ascontiguousarray(block.trained).data)
        last = first + part.tokens
        return {"tokens.bin": last * dtype.itemsize, "loss_mask.bin": last}

    def finish(self, parts: list[ExportPart], rows: ExportRows, folder: ExportFolder) -> dict[str, Any]:
        """Writes both .idx files."""
        if rows.capacity is not None:
            return nemo.FORMAT.finish(parts, rows, folder)
        dtype = id_type(rows.largest_id)
        for name, kind in (("tokens", dtype), ("loss_mask", np.dtype(np.uint8))):
            with folder.new(f"{name}.idx") as file:
                _write_index(file, rows, kind)
        return {"dtype": dtype.name, "vocab_size": rows.largest_id + 1, "sequences": len(rows)}


def _write_index(file: IO[bytes], rows: ExportRows, dtype: np.dtype[Any]) -> None:
    """Writes the header, then lengths, byte offsets and document bounds, in chunks."""
    count, ends = len(rows), rows.ends
    file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype.name], count, count + 1))
    pieces = [slice(first, min(first + CHUNK, count)) for first in range(0, count, CHUNK)]
    for piece in pieces:
        file.write((ends[piece] - _begins(ends, piece)).astype("<i4").data)
    for piece in pieces:
        file.write((_begins(ends, piece) * dtype.itemsize).astype("<i8").data)
    for first in range(0, count + 1, CHUNK):
        file.write(np.arange(first, min(first + CHUNK, count + 1), dtype="<i8").data)


def _begins(ends: Int64, piece: slice) -> Int64:
    """The offset of each sequence in a chunk."""
    first = ends[piece.start - 1] if piece.start else 0
    return np.concatenate(([first], ends[piece.start : piece.stop - 1]))


FORMAT = Megatron()
