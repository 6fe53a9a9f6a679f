"""OLMo-core's numpy files: raw memory maps of tokens and label masks, with document bounds.

`token_ids_part_0000.npy` has no npy header, only the ids, in the smallest unsigned type that holds every id.
`labels_mask_part_0000.npy` has one bool per token, true if the token itself is trained. Each line of
`token_ids_part_0000.csv.gz` has the start and end of a document in its part.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.errors import UsageError
from penstock.exchange.folder import ExportFolder
from penstock.exchange.format import ExportPart, Supports
from penstock.exchange.rows import Block, ExportRows


def id_type(largest: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds the largest id."""
    return np.dtype(np.min_scalar_type(largest))


class Olmo:
    """Numpy parts of whole documents."""

    supports = Supports(separator=True)
    part_tokens = 1 << 26  # 256 MB of 4-byte ids

    def check(self, rows: ExportRows) -> None:
        """Raises an error if the separator occurs inside documents."""
        if rows.separator is None:
            return
        inside = sum(int((block.ids == rows.separator).sum()) for block in rows.blocks(0, len(rows)))
        if inside:
            raise UsageError(
                f"the --separator occurs {inside:,} times inside documents, which would be cut there. Choose a token "
                "that the template does not print."
            )

    def write(
        self, part: ExportPart, blocks: Iterator[Block], rows: ExportRows, folder: ExportFolder
    ) -> dict[str, int]:
        """Writes the ids, masks and document bounds of a part."""
        tokens, masks, bounds = _names(part)
        dtype = id_type(rows.largest_id)
        ends, before = list[bytes](), 0
        with folder.new(tokens) as token_file, folder.new(masks) as mask_file:
            for plain in blocks:
                block = plain if rows.separator is None else _separated(plain, rows.separator)
                token_file.write(np.ascontiguousarray(block.ids, dtype).data)
                mask_file.write(np.ascontiguousarray(block.trained).data)
                ends.append(_lines(block, before))
                before += len(block.ids)
        packed = io.BytesIO()
        with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, compresslevel=1) as zipped:
            for lines in ends:
                zipped.write(lines)
        with folder.new(bounds) as file:
            file.write(packed.getbuffer())
        return {tokens: before * dtype.itemsize, masks: before, bounds: packed.tell()}

    def finish(self, parts: list[ExportPart], rows: ExportRows, folder: ExportFolder) -> dict[str, Any]:
        """Returns the facts that an OLMo-core configuration needs."""
        del folder
        return {
            "dtype": id_type(rows.largest_id).name,
            "vocab_size": rows.largest_id + 1,
            "parts": len(parts),
            "longest": int(rows.served.lengths.max()) + (rows.separator is not None),
            **({} if rows.separator is None else {"separator": rows.separator}),
        }


def _names(part: ExportPart) -> tuple[str, str, str]:
    number = f"{part.number:04}"
    return f"token_ids_part_{number}.npy", f"labels_mask_part_{number}.npy", f"token_ids_part_{number}.csv.gz"


def _separated(block: Block, separator: int) -> Block:
    """The same documents, each with an untrained separator at its end."""
    ends = np.cumsum(block.lengths)
    ids, trained = np.insert(block.ids, ends, separator), np.insert(block.trained, ends, False)
    return block._replace(ids=ids, trained=trained, lengths=block.lengths + 1)


def _lines(block: Block, before: int) -> bytes:
    bounds = [str(before), *map(str, (np.cumsum(block.lengths) + before).tolist())]
    return ("\n".join(map(",".join, pairwise(bounds))) + "\n").encode()


FORMAT = Olmo()
