"""Surveys token sequences one shard at a time: their lengths, trained tokens and problems.

Statistics and the viewer's filters both use the survey, so a figure always agrees with the list behind it. It reads
segments and offsets, and token ids only at the start of rows, if the tokenizer has a BOS token. Vectorised: about a
second for a million rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntFlag
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.arrays import Bool, Int64, UInt8
from penstock.load.options import LossMask, Overlong
from penstock.load.parts import part_table
from penstock.load.policy import Runs, Tally, run_weights, tokens_by
from penstock.load.view import View
from penstock.load.windows import Rows, prompt_lengths
from penstock.prepare.chat.conversation import BODY_PARTS, Part, Role
from penstock.prepare.encode.columns import Columns

UInt16 = npt.NDArray[np.uint16]

_UNTRAINED: Final = 255  # no role
_MESSAGES: Final = 1 << 32  # more than any row has; separates the message numbers of different rows


class Flag(IntFlag):
    """Problems of a row; the viewer stores them as uint8."""

    NOTHING_TRAINED = 1
    REGIONS_UNKNOWN = 2
    NO_STOP = 4  # an answer is trained, but not its stop token
    CUT_ANSWER = 8  # max_length cuts off the end of an answer
    DOUBLE_BOS = 16
    DUPLICATE = 32  # the same content occurred in an earlier row
    OVERLONG = 64  # longer than max_length


class Extents(NamedTuple):
    """Parts of the sequences of one shard: `trained_from` counts from the row's start, as `starts` and `ends` do."""

    sequences: Int64  # number in the shard
    starts: Int64
    ends: Int64
    trained_from: Int64


class Survey(NamedTuple):
    """One entry per window."""

    lengths: Int64
    trained: Int64
    roles: UInt8  # of the whole row; bit r: tokens of Role r occur
    parts: UInt16  # of the whole row; bit p: tokens of Part p occur
    flags: UInt8
    messages: Int64  # of the whole row; 0 where regions are unknown
    tokens_by_role: dict[Role, int]
    trained_by_role: dict[Role, int]


def whole(rows: Rows) -> Extents:
    """All tokens of all sequences of a shard."""
    sizes = rows.sizes.ravel()
    prompts = np.zeros_like(sizes)
    if rows.sizes.ndim > 1:
        prompts = np.repeat(prompt_lengths(rows.columns, rows.runs), 2)
    return Extents(np.arange(len(sizes)), np.zeros_like(sizes), sizes, prompts)


def served(view: View) -> Iterator[tuple[int, Int64, Extents]]:
    """Per shard: its number, the dataset rows of its windows, and the windows that the view serves."""
    sides = 2 if view.is_preference else 1
    before = np.concatenate(([0], np.cumsum(view.dataset.shards.examples // sides)))
    cuts = np.searchsorted(view.index.rows, before)
    for shard, (first, last) in enumerate(pairwise(cuts.tolist())):
        own = slice(first, last)
        numbers = np.repeat(view.index.rows[own].astype(np.int64), sides)
        starts = np.repeat(view.index.starts[own].astype(np.int64), sides)
        prompts = np.repeat(view.index.prompts[own].astype(np.int64), 2) if sides == 2 else np.zeros_like(starts)
        lengths = view.lengths[own].astype(np.int64).ravel()
        sequences = (numbers - before[shard]) * sides + np.tile(np.arange(sides), last - first)
        yield shard, numbers, Extents(sequences, starts, starts + lengths, prompts)


def survey(
    rows: Rows, windows: Extents, mask: LossMask, overlong: Overlong = Overlong.ERROR, bos: int | None = None
) -> Survey:
    """Survey each window; `overlong` is the policy that cut the windows."""
    runs = rows.runs
    sequences, starts, ends, trained_from = windows
    weights = run_weights(mask, runs) > 0
    own = np.minimum(np.maximum(starts, trained_from), ends)
    trained = Tally(runs, weights).between(sequences, own, ends)
    tokens, trained_tokens = (
        tokens_by(groups, runs, sequences, first, ends)
        for groups, first in ((runs.roles, starts), (np.where(weights, runs.roles, np.uint8(_UNTRAINED)), own))
    )
    unknown = runs.unknown[sequences]
    messages = runs.highest_message(np.ones(len(runs.roles), np.bool_)).astype(np.int64)[sequences] + 1
    flags = np.where(trained == 0, Flag.NOTHING_TRAINED, 0)
    flags |= np.where(unknown, Flag.REGIONS_UNKNOWN, 0)
    if part_table(mask.parts, mask.weights).assistant[Part.STOP]:  # else, it is left out on purpose
        flags |= np.where(_without_stop(runs, weights, windows), Flag.NO_STOP, 0)
    if overlong in (Overlong.TRUNCATE, Overlong.TRUNCATE_LEFT):
        flags |= np.where(_cut_answers(runs, weights, windows), Flag.CUT_ANSWER, 0)
    if bos is not None:
        flags |= np.where(_double_start(rows.columns, bos)[sequences] & (starts == 0), Flag.DOUBLE_BOS, 0)
    return Survey(
        ends - starts,
        trained,
        _occurring(runs.roles, runs)[sequences].astype(np.uint8),
        _occurring(runs.parts, runs)[sequences].astype(np.uint16),
        flags.astype(np.uint8),
        np.where(unknown, 0, messages),
        {role: int(tokens[role]) for role in Role if (runs.roles == role).any()},
        {role: int(trained_tokens[role]) for role in Role if (runs.roles == role).any()},
    )


def _occurring(values: UInt8, runs: Runs) -> Int64:
    """Per sequence, the bits of the values that its tokens have."""
    found, filled = np.zeros(len(runs.counts), np.int64), runs.counts > 0
    if filled.any():
        bits = np.where(runs.lengths > 0, np.int64(1) << values.astype(np.int64), 0)
        found[filled] = np.bitwise_or.reduceat(bits, runs.offsets[:-1][filled])
    return found


def repeated(hashes: npt.NDArray[np.uint64]) -> Bool:
    """Which hashes occurred before."""
    order = np.argsort(hashes, kind="stable")
    again = np.zeros(len(hashes), np.bool_)
    again[order[1:]] = hashes[order[1:]] == hashes[order[:-1]]
    return again


def _without_stop(runs: Runs, weights: Bool, windows: Extents) -> Bool:
    """Which windows hold a complete trained answer whose stop token is missing or not trained."""
    owner = np.repeat(np.arange(len(runs.counts)), runs.counts)
    assistant = weights & runs.by(Role.ASSISTANT) & (runs.lengths > 0)
    keys = owner * _MESSAGES + runs.messages
    bodies = assistant & runs.of_part(*BODY_PARTS)
    bare = bodies & ~np.isin(keys, keys[assistant & runs.of_part(Part.STOP)])
    if not bare.any():
        return np.zeros(len(windows.sequences), np.bool_)
    first, last = np.full(len(runs.counts), np.iinfo(np.int64).max), np.full(len(runs.counts), -1)
    np.minimum.at(first, owner[bare], runs.ends[bare].astype(np.int64))
    np.maximum.at(last, owner[bare], runs.ends[bare].astype(np.int64))
    found: Bool = (first[windows.sequences] <= windows.ends) & (last[windows.sequences] > windows.starts)
    return found


def _cut_answers(runs: Runs, weights: Bool, windows: Extents) -> Bool:
    """Which windows end inside a trained answer: the tokens on both sides of the cut are trained and in one message."""
    cut = np.zeros(len(windows.sequences), np.bool_)
    some = np.flatnonzero((windows.ends < runs.sizes[windows.sequences]) & (windows.ends > windows.starts))
    if len(some):
        ends = np.cumsum(runs.lengths, dtype=np.int64)
        first = np.concatenate(([0], ends))[runs.offsets[windows.sequences[some]]]
        at = first + windows.ends[some]
        before, after = np.searchsorted(ends, at - 1, side="right"), np.searchsorted(ends, at, side="right")
        cut[some] = weights[before] & weights[after] & (runs.messages[before] == runs.messages[after])
    return cut


def _double_start(columns: Columns, bos: int) -> Bool:
    """Which sequences start with two BOS tokens."""
    starts, sizes = columns.id_offsets[:-1].astype(np.int64), np.diff(columns.id_offsets)
    double = np.zeros(len(starts), np.bool_)
    long = np.flatnonzero(sizes > 1)
    double[long] = (columns.ids[starts[long]] == bos) & (columns.ids[starts[long] + 1] == bos)
    return double
