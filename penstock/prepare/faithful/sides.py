"""The chains of rows whose turns all begin with their prompts, as columns: a few numpy passes for a batch.

The root of such a row is its whole text, or its last turn where later messages rewrite that turn.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.arrays import Bool, Int64
from penstock.prepare.faithful.chains import ChainRuns, ChainTable, Move, merged_runs
from penstock.prepare.regions.segments import gathered
from penstock.prepare.template.rendered import Rendered
from penstock.prepare.template.turns import FieldColumn, SpanColumn, Table, TagColumn, TurnColumn, Turns, TurnState

# Plain integers, because numpy takes longer to index by an enum.
_ROW, _MESSAGE, _STATE = TurnColumn.ROW.value, TurnColumn.MESSAGE.value, TurnColumn.STATE.value
_PROMPT_SIZE, _SIZE, _CUT = TurnColumn.PROMPT_SIZE.value, TurnColumn.SIZE.value, TurnColumn.CUT.value
_FLAGS = TurnColumn.FLAGS.value
_OF_ROOT = TurnState.IN_ROOT.value | TurnState.IS_ROOT.value
_SPANS = (SpanColumn.MESSAGE.value, SpanColumn.START.value, SpanColumn.END.value)
_FIELDS = (FieldColumn.LABEL.value, FieldColumn.START.value, FieldColumn.END.value)
_TAGS = (TagColumn.START.value, TagColumn.START.value, TagColumn.END.value)


def with_roots(rendered: Rendered) -> Rendered:
    """The same rows, with the texts of their roots."""
    turns = rendered.turns
    assert turns is not None
    states = turns.table[:, _STATE]
    numbers = np.flatnonzero((states & (_OF_ROOT | TurnState.CONTINUES)) == (TurnState.IS_ROOT | TurnState.CONTINUES))
    if not len(numbers):
        return rendered
    rows, texts = turns.table[numbers, _ROW].astype(np.int64), rendered.texts
    for row, text in zip(rows.tolist(), _kept_texts(turns, numbers), strict=True):
        texts[row] = text
    ends = np.cumsum([len(text) for text in texts])
    starts = np.concatenate(([0], ends))[:-1]
    known, to = rendered.known.copy(), np.arange(len(texts))
    known[rows] &= (states[numbers] & TurnState.KNOWN.value) > 0
    to[rows] = -1
    move = Move(to, np.concatenate(([0], rendered.text_ends))[:-1], starts)
    tables = (turns.spans, _SPANS), (turns.tags, _TAGS), (turns.fields, _FIELDS)
    own = [_runs_of(*table, numbers, known[rows]) for table in tables]
    others = (
        move(rendered.span_rows, rendered.span_messages, rendered.span_starts, rendered.span_ends),
        move(rendered.tag_rows, rendered.tag_rows, rendered.tag_starts, rendered.tag_ends),
        move(*rendered.fields),
    )
    spans, tags, fields = (merged_runs(*pair, rows, starts) for pair in zip(others, own, strict=True))
    return replace(
        rendered,
        data=b"".join(texts),
        text_ends=ends,
        known=known,
        span_rows=spans.examples.astype(np.int32),
        span_messages=spans.numbers.astype(np.int32),
        span_starts=spans.starts,
        span_ends=spans.ends,
        tag_rows=tags.examples.astype(np.int32),
        tag_starts=tags.starts,
        tag_ends=tags.ends,
        fields=fields.as_fields(),
    )


def side_chains(roots: Rendered, rows: npt.NDArray[Any], safe: tuple[bytes, ...], apart: Collection[int]) -> ChainTable:
    """The chains beside the roots of some rows. A turn that the root lacks extends the chain of the turn before it, or
    begins one. Texts can be cut at `safe` tokens; chains of rows in `apart` share nothing."""
    assert roots.turns is not None
    numbers, table, follows = _lacking_turns(roots.turns, rows)
    firsts = np.flatnonzero(~follows)
    lasts = np.append(firsts[1:], len(table))[: len(firsts)] - 1
    row, cuts = table[lasts, _ROW], table[lasts, _CUT]
    known = roots.known[row] & ((table[lasts, _STATE] & TurnState.KNOWN.value) > 0)
    may_share = known & bool(safe) & ~np.isin(row, list(apart))
    texts = _kept_texts(roots.turns, numbers[lasts])
    is_start = np.array([text.startswith(safe) for text in texts], np.bool_)
    limits = table[firsts, _PROMPT_SIZE]
    skipped = np.where(may_share & (cuts <= limits) & is_start, cuts, 0)
    origins = np.concatenate(([0], roots.text_ends))[:-1][row]
    _find_starts(roots, safe, skipped, np.flatnonzero(may_share & (skipped < cuts)), row, np.minimum(cuts - 1, limits))
    for chain in np.flatnonzero(skipped < cuts).tolist():
        origin = int(origins[chain])
        texts[chain] = roots.data[origin + int(skipped[chain]) : origin + int(cuts[chain])] + texts[chain]
    spans, tags, fields = _side_runs(roots, numbers[lasts], row, known, skipped, cuts)
    of_turn, messages = np.cumsum(~follows) - 1, table[:, _MESSAGE]
    others = np.stack((np.arange(len(row)), messages[firsts] + 1, messages[lasts]), axis=1)
    nothing = np.zeros(len(row), np.int64)
    return ChainTable(
        rows=row,
        texts=texts,
        known=known,
        is_root=nothing > 0,
        skipped=skipped,
        seams=nothing,
        spans=spans,
        tags=tags,
        fields=fields,
        turns=np.column_stack((of_turn, table[:, [_MESSAGE, _PROMPT_SIZE, _SIZE, _FLAGS]])),
        others=others[others[:, 1] < others[:, 2]],
    )


def _find_starts(
    roots: Rendered, safe: tuple[bytes, ...], starts: Int64, chains: Int64, rows: Int64, limits: Int64
) -> None:
    """Moves the starts of chains to the last message of the root, up to a limit, at which the tokenizer can start."""
    offsets = np.searchsorted(roots.span_rows, np.arange(len(roots.text_ends) + 1))
    for chain in chains.tolist():
        row = int(rows[chain])
        origin = int(roots.text_ends[row - 1]) if row else 0
        places = roots.span_starts[offsets[row] : offsets[row + 1]] - origin
        earlier = reversed(places[(places > 0) & (places <= limits[chain])].tolist())
        starts[chain] = next((at for at in earlier if roots.data.startswith(safe, origin + at)), 0)


def _kept_texts(turns: Turns, numbers: Int64) -> list[bytes]:
    kept, kept_prompts = turns.kept
    ends = (np.cumsum(kept + kept_prompts) - kept_prompts)[numbers]
    places = zip((ends - kept[numbers]).tolist(), ends.tolist(), strict=True)
    return [turns.data[start:end] for start, end in places]


def _lacking_turns(turns: Turns, rows: npt.NDArray[Any]) -> tuple[Int64, Int64, Bool]:
    """The turns of some rows that their roots lack, in order: their numbers, their lines of the table, and whether each
    extends the one before it."""
    numbers = np.flatnonzero(np.isin(turns.table[:, _ROW], rows))
    numbers = numbers[np.lexsort((turns.table[numbers, _MESSAGE], turns.table[numbers, _ROW]))]
    table = turns.table[numbers].astype(np.int64)
    lacking = (table[:, _STATE] & _OF_ROOT) == 0
    follows = lacking & ((table[:, _STATE] & TurnState.EXTENDS.value) > 0)
    follows[1:] &= lacking[:-1] & (table[1:, _ROW] == table[:-1, _ROW])
    follows[:1] = False
    return numbers[lacking], table[lacking], follows[lacking]


def _runs_of(runs: Table, columns: tuple[int, int, int], numbers: Int64, known: Bool) -> ChainRuns:
    """The runs in the kept texts of turns, numbered by their place in `numbers`."""
    chosen = np.flatnonzero(known)
    of_number = np.searchsorted(runs[:, 0], np.arange(int(numbers.max(initial=-1)) + 2))
    places, offsets = gathered(of_number, numbers[chosen])
    return ChainRuns(np.repeat(chosen, np.diff(offsets)), *runs[places][:, columns].astype(np.int64).T)


def _side_runs(
    roots: Rendered, numbers: Int64, rows: Int64, known: Bool, skipped: Int64, cuts: Int64
) -> tuple[ChainRuns, ChainRuns, ChainRuns]:
    """The spans, tags and fields of chains: the root's from `skipped` to `cuts`, then those of the turns `numbers`."""
    assert roots.turns is not None
    partly = np.flatnonzero(known & (skipped < cuts))
    origins = np.concatenate(([0], roots.text_ends))[:-1][rows]

    def moved(runs: ChainRuns) -> ChainRuns:
        shift = skipped[runs.examples]
        return runs._replace(starts=runs.starts - shift, ends=runs.ends - shift)

    def of_root(of_rows: npt.NDArray[Any], *columns: npt.NDArray[Any]) -> ChainRuns:
        places, offsets = gathered(np.searchsorted(of_rows, np.arange(len(roots.text_ends) + 1)), rows[partly])
        examples = np.repeat(partly, np.diff(offsets))
        numbers, starts, ends = (column[places].astype(np.int64) for column in columns)
        return ChainRuns(examples, numbers, starts - origins[examples], ends - origins[examples])

    def between(before: ChainRuns, inside: Bool, own: ChainRuns) -> ChainRuns:
        return moved(ChainRuns(*(column[inside] for column in before))).followed_by(own, 0)

    spans = moved(_runs_of(roots.turns.spans, _SPANS, numbers, known))
    tags = moved(_runs_of(roots.turns.tags, _TAGS, numbers, known))
    fields = moved(_runs_of(roots.turns.fields, _FIELDS, numbers, known))
    if len(partly):
        before = of_root(roots.span_rows, roots.span_messages, roots.span_starts, roots.span_ends)
        inside = (before.starts >= skipped[before.examples]) & (before.starts < cuts[before.examples])
        spans = between(before, inside, spans)
        before = of_root(roots.tag_rows, roots.tag_rows, roots.tag_starts, roots.tag_ends)
        inside = (before.ends > skipped[before.examples]) & (before.ends <= cuts[before.examples])
        tags = between(before, inside, tags)
        before = of_root(*roots.fields)
        inside = (before.ends > skipped[before.examples]) & (before.starts < cuts[before.examples])
        fields = between(before, inside, fields)
    return spans, tags, fields
