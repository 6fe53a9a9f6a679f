"""Proof of exactness: a seeded sample of each slice is redone with the reference engines and compared.

The sample is a function of the slice's digest and row sizes alone: at least one row, at most about 0.1% of the bytes
(the reference is some 30 times slower, so this is the price of 3% of the time).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.build.batch import ExampleBatch, encode_pieces, encode_texts
from penstock.build.pipeline import Pipeline, SliceResult
from penstock.encode.code_points import is_composed
from penstock.errors import RowError

SHARE = 0.001


def sampled_rows(slice_digest: str, sizes: Sequence[int]) -> list[int]:
    """Numbers of the rows to redo, sorted."""
    if not sizes:
        return []
    order = np.random.Generator(np.random.PCG64(int(slice_digest.removeprefix("b3-")[:16], 16))).permutation(len(sizes))
    budget = sum(sizes) * SHARE
    chosen = [int(order[0])]
    spent = sizes[chosen[0]]
    for row in order[1:64].tolist():
        if spent + sizes[row] > budget:
            break
        chosen.append(row)
        spent += sizes[row]
    return sorted(chosen)


def mismatches(pipeline: Pipeline, rows: Sequence[bytes], sample: Sequence[int], result: SliceResult) -> list[int]:
    """Those of the sampled rows that the references see differently."""
    rejected = {entry["row"] for entry in result.rejected}
    return [row for row in sample if _differs(pipeline, rows[row], row, row in rejected, result)]


def _differs(pipeline: Pipeline, data: bytes, row: int, rejected: bool, result: SliceResult) -> bool:
    if rejected:
        return False  # rejected by the references or before any engine: both say the same
    columns = result.columns
    first, last = np.searchsorted(columns.rows, [row, row + 1])
    try:
        expected = redo(pipeline, data)
    except RowError:
        return True
    if len(expected) != last - first:
        return True
    for batch, k in zip(expected, range(first, last), strict=True):
        ids = columns.ids[columns.id_offsets[k] : columns.id_offsets[k + 1]]
        own = slice(columns.segment_offsets[k], columns.segment_offsets[k + 1])
        same = (
            np.array_equal(ids, batch.ids)
            and np.array_equal(columns.segment_ends[own], batch.ends)
            and np.array_equal(columns.segment_roles[own], batch.roles)
            and np.array_equal(columns.segment_parts[own], batch.parts)
            and np.array_equal(columns.segment_messages[own], batch.messages)
        )
        if not same:
            return True
    return False


def redo(pipeline: Pipeline, row: bytes) -> list[ExampleBatch]:
    """The examples of one row, by the reference engines alone."""
    examples: list[ExampleBatch] = []
    stages = (pipeline.encoder, pipeline.normaliser, pipeline.vocabulary)
    for conversation in pipeline.reader.conversations(row):
        way = pipeline.way(conversation)
        if way == "":
            examples.append(encode_pieces([conversation], *stages, reference=True))
            continue
        rendering = pipeline.renderings[way]
        adapted = [rendering.adapter.adapt(conversation)]
        regions = rendering.engine.reference(adapted)
        segments, _ = rendering.splitter.split(adapted, regions)
        example = encode_texts(adapted, regions.texts, segments, *stages, reference=True)
        # The truth is the tokenizer on the text as rendered, whatever was normalised ahead of it.
        if not is_composed(regions.data.decode()):
            example.ids = pipeline.encoder.reference([regions.data]).ids
        examples.append(example)
    return examples
