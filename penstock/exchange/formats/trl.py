"""Tokenized rows for TRL's trainers.

SFT: `input_ids` and `labels` (plus `seq_lengths` for packed rows), with the masks that older releases read. DPO:
`prompt_ids`, `chosen_ids`, `rejected_ids`. KTO: `prompt_ids`, `completion_ids`, `label`, and the texts `prompt` and
`completion`. TRL's DPO and KTO score every token after the prompt, so tokens after the last trained one are omitted; an
untrained token before it can't be expressed and is an error.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from penstock.arrays import Int64
from penstock.errors import UsageError
from penstock.exchange.format import Supports
from penstock.exchange.rows import Block, ExportRows, text_of
from penstock.exchange.tables import (
    ArrowFolder,
    Columns,
    TableFormat,
    input_ids,
    labels,
    lists,
    loss_mask,
    seq_lengths,
)
from penstock.load.packing import ranges


def _columns(block: Block, rows: ExportRows) -> Columns:
    if rows.is_preference:
        return _pairs(block)
    if rows.is_labelled:
        return _answers(block, rows)
    columns = {"input_ids": input_ids(block), "labels": labels(block, rows)}
    columns |= {"assistant_masks": loss_mask(block, rows), "completion_mask": loss_mask(block, rows)}
    if rows.capacity is not None:
        columns["seq_lengths"] = seq_lengths(block)
    return columns


def _pairs(block: Block) -> Columns:
    count, starts, lasts = len(block.prompts), block.starts, _last_trained(block)
    tokens, _ = ranges(starts[:count], starts[:count] + block.prompts)
    columns = {"prompt_ids": lists(block.ids[tokens], block.prompts, np.int32)}
    for name, side in (("chosen_ids", slice(0, count)), ("rejected_ids", slice(count, None))):
        begins = starts[side] + block.prompts
        tokens, _ = ranges(begins, lasts[side])
        columns[name] = lists(block.ids[tokens], lasts[side] - begins, np.int32)
    return columns


def _answers(block: Block, rows: ExportRows) -> Columns:
    """The prompt and completion of labelled answers."""
    starts, firsts, lasts = block.starts, _first_trained(block), _last_trained(block)
    columns = {}
    for name, begins, ends in (("prompt", starts, firsts), ("completion", firsts, lasts)):
        tokens, _ = ranges(begins, ends)
        columns[f"{name}_ids"] = lists(block.ids[tokens], ends - begins, np.int32)
        spans = zip(begins.tolist(), ends.tolist(), strict=True)
        columns[name] = pa.array([text_of(rows, block.ids[first:last]) for first, last in spans], pa.string())
    assert block.desirable is not None, "labelled data"
    return {**columns, "label": pa.array(block.desirable.astype(np.bool_))}


def _first_trained(block: Block) -> Int64:
    """The first trained token of each sequence; every sequence has one."""
    places = np.flatnonzero(block.trained)
    return places[np.searchsorted(places, block.starts)]


def _last_trained(block: Block) -> Int64:
    """The end of the last trained token of each sequence; every sequence has one."""
    places = np.flatnonzero(block.trained)
    return places[np.searchsorted(places, np.cumsum(block.lengths)) - 1] + 1


def _check(rows: ExportRows) -> None:
    if not rows.is_preference and not rows.is_labelled:
        return
    wrong = 0
    for block in rows.blocks(0, len(rows)):
        prompts = _first_trained(block) - block.starts if rows.is_labelled else np.tile(block.prompts, 2)
        scored = _last_trained(block) - block.starts - prompts
        trained = np.add.reduceat(block.trained, block.starts, dtype=np.int64)
        wrong += int((scored != trained).reshape(-1, len(block.counts)).any(axis=0).sum())
    if wrong and rows.is_labelled:
        raise UsageError(
            f"{wrong} of {len(rows)} rows have untrained tokens after the first trained one, and TRL's KTO scores "
            "every token after the prompt. Use train_on='last_assistant_message': a label judges the last answer."
        )
    if wrong:
        raise UsageError(
            f"{wrong} of {len(rows)} pairs have untrained tokens inside an answer, and TRL's DPO scores every token "
            "after the prompt. Train on them (without parts, or with train_on='all_tokens'), or use --to hf, which has "
            "masks."
        )


FORMAT = TableFormat(
    columns=_columns,
    container=ArrowFolder(),
    supports=Supports(pairs=True, packed=True, labels=True),
    check_rows=_check,
)
