"""Applies a view's settings to one shard: selects the windows of its rows to serve, and accounts for all rows.

Every served window holds at least one trained token (pairs: on both sides). Windows have row numbers within the shard,
and the ledger adds up. Vectorised; each row is visited once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple, assert_never

import numpy as np

from penstock.arrays import Bool, Int64
from penstock.errors import UsageError, ViewError
from penstock.load.options import HoldoutSide, LossMask, Overlong, ViewOptions
from penstock.load.parts import PART_NAMES
from penstock.load.policy import Runs, Tally, UInt64, run_weights, undivided
from penstock.prepare.chat.conversation import Part, Role
from penstock.prepare.encode.columns import Columns

# ---- windows ---------------------------------------------------------------------------------------------------------
# Over-length policies: which window of each row is served.
#
# Windows (row, start, length) are in row order, and none is longer than `max_length`. With `split`, the windows of a
# row partition it; with `drop`, an over-long row has none; otherwise each row has one. Vectorised, linear in the number
# of windows.


class Windows(NamedTuple):
    """Served parts of rows. For pairs, `lengths` has a column per side, and both sides share the start."""

    rows: Int64
    starts: Int64
    lengths: Int64
    prompts: Int64  # pairs: end of the common prompt in the row; empty for single rows

    def where(self, keep: Bool) -> Windows:
        """Only the windows to keep."""
        prompts = self.prompts[keep] if len(self.prompts) else self.prompts
        return Windows(self.rows[keep], self.starts[keep], self.lengths[keep], prompts)


_NO_PROMPTS: Final = np.empty(0, np.int64)


def windows(overlong: Overlong, limit: int | None, sizes: Int64) -> Windows:
    """The windows of single rows. `error` counts as no limit here: the caller raises, since it can name the row."""
    rows = np.arange(len(sizes))
    if limit is None:
        return Windows(rows, np.zeros_like(sizes), sizes, _NO_PROMPTS)
    match overlong:
        case Overlong.TRUNCATE:
            return Windows(rows, np.zeros_like(sizes), np.minimum(sizes, limit), _NO_PROMPTS)
        case Overlong.TRUNCATE_LEFT:
            lengths = np.minimum(sizes, limit)
            return Windows(rows, sizes - lengths, lengths, _NO_PROMPTS)
        case Overlong.DROP:
            return Windows(rows, np.zeros_like(sizes), sizes, _NO_PROMPTS).where(sizes <= limit)
        case Overlong.SPLIT:
            return _split(limit, sizes)
        case Overlong.ERROR:
            return Windows(rows, np.zeros_like(sizes), sizes, _NO_PROMPTS)
        case _:
            assert_never(overlong)


def _split(limit: int, sizes: Int64) -> Windows:
    chunks = np.maximum(-(-sizes // limit), 1)  # an empty row has one empty chunk, so that it is counted
    rows = np.repeat(np.arange(len(sizes)), chunks)
    first = np.cumsum(chunks) - chunks
    starts = (np.arange(len(rows)) - first[rows]) * limit
    return Windows(rows, starts, np.minimum(sizes[rows] - starts, limit), _NO_PROMPTS)


def pair_windows(overlong: Overlong, limit: int | None, sizes: Int64, prompts: Int64) -> Windows:
    """The windows of pairs: `sizes` has a column per side, `prompts` the length of their common prompt.

    `truncate` keeps the head of both sides. `truncate_left` removes the same number of tokens from the start of the
    prompt on both sides, enough for the longer side to fit; if removing the whole prompt is not enough, the completion
    is cut at its end. Both sides therefore always start with the same prompt.
    """
    if overlong is Overlong.SPLIT:
        raise UsageError(
            "overlong='split' can't be used with preference data, because it would split pairs. "
            "Use 'truncate', 'truncate_left', 'drop' or 'error'."
        )
    rows, starts = np.arange(len(sizes)), np.zeros(len(sizes), np.int64)
    if limit is None:
        return Windows(rows, starts, sizes, prompts)
    match overlong:
        case Overlong.TRUNCATE:
            return Windows(rows, starts, np.minimum(sizes, limit), prompts)
        case Overlong.TRUNCATE_LEFT:
            starts = np.clip(sizes.max(axis=1) - limit, 0, prompts)
            return Windows(rows, starts, np.minimum(sizes - starts[:, None], limit), prompts)
        case Overlong.DROP:
            return Windows(rows, starts, sizes, prompts).where(sizes.max(axis=1) <= limit)
        case Overlong.ERROR:
            return Windows(rows, starts, sizes, prompts)
        case _:
            assert_never(overlong)


# ---- prompts ---------------------------------------------------------------------------------------------------------
# The common prompt of a pair: the tokens before the answers start to differ, at message granularity.
#
# It is the longest common prefix of tokens; if the prefix ends inside an assistant message, it is cut back to the start
# of the message's body. Answers that start with the same words thus count as different from their first token, and the
# header belongs to the prompt. The common prompt is never trained: it is equal on both sides and expresses no
# preference.
#
# This is the only place where a view reads token ids to build its index. It reads just the common prefixes (plus one
# block), in blocks over all pairs at once.


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


# ---- ledger ----------------------------------------------------------------------------------------------------------
#
# The view ledger: accounts for every row and token of a dataset under a view. Its sums add up exactly.
#
#     rows   = kept + dropped (by reason)               in the view's part; `other_part` counts the rest of the dataset
#     tokens = trained + masked + truncated + dropped   in the same rows
#
# Trained and masked tokens are also counted by part, in a pass of their own: the index doesn't need them.
#
# A row is one example, or one pair with the tokens of both sides. With `split`, a kept row may serve several examples,
# and its chunks without a trained token count as dropped tokens.


class Reason(StrEnum):
    """Why a row or chunk is dropped."""

    REGIONS_UNKNOWN = "regions_unknown"
    PARTS_UNKNOWN = "parts_unknown"  # an answer is not divided into the parts that the view tells apart
    OVERLONG = "overlong"
    NO_TRAINED_TOKEN = "no_trained_token"
    CHUNK_WITHOUT_TRAINED_TOKEN = "chunk_without_trained_token"  # the row serves other chunks


@dataclass(frozen=True, slots=True)
class Ledger:
    """Counts of rows and tokens. Ledgers of disjoint rows can be added."""

    rows: int = 0
    kept: int = 0
    examples: int = 0  # served; differs from `kept` under split
    other_part: int = 0
    tokens: int = 0
    trained: int = 0
    masked: int = 0
    truncated: int = 0
    trained_by_part: Mapping[str, int] = field(default_factory=dict)
    masked_by_part: Mapping[str, int] = field(default_factory=dict)
    dropped_rows: Mapping[str, int] = field(default_factory=dict)
    dropped_tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def dropped(self) -> int:
        """Tokens dropped for any reason."""
        return sum(self.dropped_tokens.values())

    @property
    def by_part(self) -> dict[str, tuple[int, int]]:
        """The tokens that are served, and the trained ones among them, by part."""
        return {
            name: (trained + self.masked_by_part.get(name, 0), trained)
            for name in PART_NAMES.values()
            if (trained := self.trained_by_part.get(name, 0)) or name in self.masked_by_part
        }

    @property
    def adds_up(self) -> bool:
        """Whether all sums hold; false indicates a bug in Penstock."""
        return (
            self.rows == self.kept + sum(self.dropped_rows.values())
            and self.tokens == self.trained + self.masked + self.truncated + self.dropped
            and self.trained == sum(self.trained_by_part.values())
            and self.masked == sum(self.masked_by_part.values())
        )

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(
            rows=self.rows + other.rows,
            kept=self.kept + other.kept,
            examples=self.examples + other.examples,
            other_part=self.other_part + other.other_part,
            tokens=self.tokens + other.tokens,
            trained=self.trained + other.trained,
            masked=self.masked + other.masked,
            truncated=self.truncated + other.truncated,
            trained_by_part=_sum(self.trained_by_part, other.trained_by_part),
            masked_by_part=_sum(self.masked_by_part, other.masked_by_part),
            dropped_rows=_sum(self.dropped_rows, other.dropped_rows),
            dropped_tokens=_sum(self.dropped_tokens, other.dropped_tokens),
        )

    def to_json(self) -> dict[str, object]:
        """Plain values, with the total of dropped tokens."""
        return {**asdict(self), "dropped": self.dropped}


def _sum(left: Mapping[str, int], right: Mapping[str, int]) -> dict[str, int]:
    return {name: left.get(name, 0) + right.get(name, 0) for name in sorted({*left, *right})}


def empty_view(ledger: Ledger, settings: ViewOptions) -> ViewError:
    """The error for a view that serves no examples."""
    if not ledger.rows:
        return ViewError(_no_rows(ledger.other_part, settings))
    parts = "; ".join(_explained(reason, count, settings) for reason, count in ledger.dropped_rows.items())
    part = " that are held out" if settings.holdout_side is HoldoutSide.HELD_OUT else ""
    return ViewError(f"the view has no examples: it leaves out all {ledger.rows:,} rows{part}. {parts}.")


def _no_rows(others: int, settings: ViewOptions) -> str:
    if not others:
        return "the view has no examples because the dataset has none. Its build ledger says why rows were rejected."
    if settings.holdout_side is HoldoutSide.HELD_OUT:
        return (
            f"the hold-out is empty: holdout={settings.holdout} holds out none of {others:,} rows. "
            "Hold out a larger fraction, or a number of rows (holdout=1)."
        )
    return (
        f"nothing is left to train on: holdout={settings.holdout} holds out all {others:,} rows. "
        "Hold out a smaller fraction, or a number of rows (holdout=1)."
    )


def _explained(reason: str, count: int, settings: ViewOptions) -> str:
    match Reason(reason):
        case Reason.OVERLONG:
            return (
                f"{count:,} are longer than max_length={settings.max_length} (overlong={settings.overlong.value!r}): "
                "raise max_length, or use 'truncate'"
            )
        case Reason.REGIONS_UNKNOWN:
            return (
                f"{count:,} have unknown regions (regions_unknown={settings.regions_unknown.value!r}): "
                "use another template, or train_on='all_tokens'"
            )
        case Reason.PARTS_UNKNOWN:
            return (
                f"{count:,} have answers that are not divided into parts "
                f"(regions_unknown={settings.regions_unknown.value!r}): use another template, or leave out parts and "
                "part_weights"
            )
        case Reason.NO_TRAINED_TOKEN | Reason.CHUNK_WITHOUT_TRAINED_TOKEN:
            limit = f" within max_length={settings.max_length}" if settings.max_length is not None else ""
            parts = f" with parts={settings.parts!r}" if settings.parts else ""
            other = "use another train_on or other parts" if parts else "use another train_on"
            remedy = "raise it, or use overlong='truncate_left'" if limit else other
            return f"{count:,} have no token that train_on={settings.policy.value!r}{parts} trains{limit}: {remedy}"


# ---- shard -----------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The rows of one shard: single examples, or pairs."""

    columns: Columns
    runs: Runs
    sizes: Int64  # pairs: a column per side
    unknown: Bool  # unknown regions (pairs: on either side)

    @classmethod
    def of(cls, columns: Columns) -> Rows:
        """All rows of a shard."""
        runs = Runs.of(columns)
        if columns.sides is None:
            return cls(columns, runs, runs.sizes, runs.unknown)
        return cls(columns, runs, runs.sizes.reshape(-1, 2), runs.unknown[0::2] | runs.unknown[1::2])

    def unusable(self, mask: LossMask) -> Bool:
        """Rows that can't be served under this mask: their regions, or parts that it tells apart, are unknown."""
        found = undivided(mask, self.runs)
        if self.sizes.ndim > 1:
            found = found[0::2] | found[1::2]
        return found | self.unknown if mask.policy.needs_regions else found

    @property
    def tokens(self) -> Int64:
        """Tokens per row, of both sides."""
        return _both(self.sizes)

    @property
    def longest(self) -> Int64:
        """Tokens per row, of the longer side."""
        return self.sizes if self.sizes.ndim == 1 else self.sizes.max(axis=1)


def row_hashes(columns: Columns) -> UInt64:
    """One hash per row; the sides of a pair share it."""
    return columns.row_hashes if columns.sides is None else columns.row_hashes[0::2]


def each_row_once(columns: Columns) -> UInt64:
    """The hashes of the rows that a shard's examples come from, once per row."""
    hashes = row_hashes(columns)
    if columns.prefixes is None:
        return hashes
    return hashes[np.flatnonzero(np.diff(columns.rows, prepend=np.uint32(0xFFFFFFFF)))]


def serve(rows: Rows, part: Bool, unknown: Bool, settings: ViewOptions) -> tuple[Windows, Ledger]:
    """The windows to serve from the rows of `part`, a side of the hold-out. Rows flagged `unknown` are dropped."""
    usable = np.flatnonzero(part & ~unknown)
    tally = Tally(rows.runs, run_weights(settings.mask, rows.runs) > 0)
    cut_of = _cut_singles if rows.sizes.ndim == 1 else _cut_pairs
    cut, trained = cut_of(rows, usable, tally, settings)
    keep = (trained if trained.ndim == 1 else trained.min(axis=1)) > 0
    served = cut.where(keep)

    cut_rows, kept_rows = np.zeros_like(part), np.zeros_like(part)
    cut_rows[cut.rows], kept_rows[served.rows] = True, True
    cut_tokens, tokens = _both(cut.lengths), rows.tokens
    of_kept = kept_rows[cut.rows]
    trained_tokens = int(trained[keep].sum())
    overlong = part & ~unknown & ~cut_rows
    untrained = cut_rows & ~kept_rows
    ledger = Ledger(
        rows=int(part.sum()),
        kept=int(kept_rows.sum()),
        examples=len(served.rows),
        other_part=int((~part).sum()),
        tokens=int(tokens[part].sum()),
        trained=trained_tokens,
        masked=int(cut_tokens[keep].sum()) - trained_tokens,
        truncated=int(tokens[kept_rows].sum()) - int(cut_tokens[of_kept].sum()),
        dropped_rows=_counts(
            {
                Reason.REGIONS_UNKNOWN: (unknown & rows.unknown).sum(),
                Reason.PARTS_UNKNOWN: (unknown & ~rows.unknown).sum(),
                Reason.OVERLONG: overlong.sum(),
                Reason.NO_TRAINED_TOKEN: untrained.sum(),
            }
        ),
        dropped_tokens=_counts(
            {
                Reason.REGIONS_UNKNOWN: tokens[unknown & rows.unknown].sum(),
                Reason.PARTS_UNKNOWN: tokens[unknown & ~rows.unknown].sum(),
                Reason.OVERLONG: tokens[overlong].sum(),
                Reason.NO_TRAINED_TOKEN: tokens[untrained].sum(),
                Reason.CHUNK_WITHOUT_TRAINED_TOKEN: cut_tokens[of_kept & ~keep].sum(),
            }
        ),
    )
    return served, ledger


def _cut_singles(rows: Rows, usable: Int64, tally: Tally, settings: ViewOptions) -> tuple[Windows, Int64]:
    """Windows of usable rows, and the trained tokens in each."""
    cut = windows(settings.overlong, settings.max_length, rows.sizes[usable])
    cut = cut._replace(rows=usable[cut.rows])
    trained = tally.totals[cut.rows]
    partial = cut.lengths != rows.sizes[cut.rows]
    some = cut.where(partial)
    trained[partial] = tally.between(some.rows, some.starts, some.starts + some.lengths)
    return cut, trained


def _cut_pairs(rows: Rows, usable: Int64, tally: Tally, settings: ViewOptions) -> tuple[Windows, Int64]:
    """Windows of usable pairs, and the trained tokens after the common prompt on each side."""
    prompts = prompt_lengths(rows.columns, rows.runs)[usable]
    cut = pair_windows(settings.overlong, settings.max_length, rows.sizes[usable], prompts)
    cut = cut._replace(rows=usable[cut.rows])
    trained = np.empty_like(cut.lengths)
    for side in (0, 1):
        ends = cut.starts + cut.lengths[:, side]
        trained[:, side] = tally.between(2 * cut.rows + side, np.minimum(cut.prompts, ends), ends)
    return cut, trained


def _both(tokens: Int64) -> Int64:
    return tokens if tokens.ndim == 1 else tokens.sum(axis=1)


def _counts(counts: dict[Reason, np.int64]) -> dict[str, int]:
    return {reason.value: int(count) for reason, count in counts.items() if count}
