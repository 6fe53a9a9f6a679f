"""The common prompt of a pair: the tokens before the answers start to differ, at message granularity.

It is the longest common prefix of tokens; if the prefix ends inside an assistant message, it is cut back to the start
of the message's body. Answers that start with the same words thus count as different from their first token, and the
header belongs to the prompt. The common prompt is never trained: it is equal on both sides and expresses no preference.

This is the only place where a view reads token ids to build its index. It reads just the common prefixes (plus one
block), in blocks over all pairs at once.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from penstock.arrays import Int64
from penstock.chat.conversation import Part, Role
from penstock.store.columns import Columns
from penstock.view.runs import Runs

_BLOCK: Final = 32  # tokens compared at first
_CELLS: Final = 1 << 18  # tokens compared at once, which bounds the memory


def prompt_lengths(columns: Columns, runs: Runs) -> Int64:
    """Tokens in the common prompt of each pair of a shard; `runs` are the shard's."""
    sizes, starts = runs.sizes, columns.id_offsets[:-1].astype(np.int64)
    common = _common_prefixes(columns, starts[0::2], starts[1::2], np.minimum(sizes[0::2], sizes[1::2]))
    bounds = _answer_starts(runs, sizes, np.repeat(common, 2))
    return np.minimum(bounds[0::2], bounds[1::2])


def _common_prefixes(columns: Columns, left: Int64, right: Int64, sizes: Int64) -> Int64:
    """The number of equal tokens starting at `left` and `right`, at most `sizes`."""
    common = np.zeros(len(sizes), np.int64)
    live = np.flatnonzero(sizes)
    block = _BLOCK
    while len(live):
        left_over = (sizes - common)[live]
        steps = np.arange(min(block, int(left_over.max())))
        inside = steps < left_over[:, None]
        offsets = np.where(inside, common[live, None] + steps, 0)
        differ = columns.ids[left[live, None] + offsets] != columns.ids[right[live, None] + offsets]
        differ |= ~inside
        ended = differ.any(axis=1)
        common[live] += np.where(ended, differ.argmax(axis=1), len(steps))
        live = live[~ended & (common[live] < sizes[live])]
        block = max(_BLOCK, _CELLS // max(len(live), 1))
    return common


def _answer_starts(runs: Runs, sizes: Int64, common: Int64) -> Int64:
    """Per side: the common prefix, cut back to the start of the assistant answer that it ends in."""
    bounds = common.copy()
    sides = np.flatnonzero(sizes)
    if not len(sides):
        return bounds
    joined = np.cumsum(runs.lengths, dtype=np.int64)
    base = np.cumsum(sizes) - sizes
    # A side that ends with the prefix is inside the message of its own last token.
    run = np.searchsorted(joined, base[sides] + np.minimum(common[sides], sizes[sides] - 1), side="right")
    answer = runs.by(Role.ASSISTANT) & ~runs.of_part(Part.HEADER)
    inside = answer[run]
    sides, run = sides[inside], run[inside]
    start = joined - runs.lengths
    slot = _message_slots(runs)
    opening = np.zeros(int(slot.max(initial=-1)) + 1, np.int64)
    answers = np.flatnonzero(answer)[::-1]  # reversed, so that the first run of a message is written last and wins
    opening[slot[answers]] = start[answers]
    bounds[sides] = opening[slot[run]] - base[sides]
    return bounds


def _message_slots(runs: Runs) -> Int64:
    """A number per run that identifies its message and example."""
    width = runs.highest_message(np.ones(len(runs.roles), np.bool_)).astype(np.int64) + 2
    first: Int64 = np.cumsum(width) - width + 1
    return np.repeat(first, runs.counts) + runs.messages
