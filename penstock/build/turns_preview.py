"""Previews what `--turns faithful` would change, by rendering a sample of rows in both modes.

Stores nothing. Costs two renders of each turn of the sample, and half a second to load an encoder unless one is given.
That is quadratic in the length of a row, so the sample ends before the first row that would exceed the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from penstock.build.conversations import ConversationReader
from penstock.build.outcome import COMPARED_ROWS
from penstock.prepare.chat.conversation import BODY_PARTS, Part, Role
from penstock.prepare.chat.notes import Note
from penstock.prepare.encode.columns import Columns
from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.modes import TurnsMode
from penstock.prepare.pipeline import Pipeline
from penstock.prepare.recipe import Recipe
from penstock.prepare.sources.slices import SliceRows
from penstock.store.dataset import Dataset
from penstock.store.files import read_regular

_MOST_WORK = 1_000_000_000  # bytes of a row times its messages, summed up: about two seconds


@dataclass(frozen=True, slots=True)
class ModeTotals:
    """Totals of a sample rendered in one mode."""

    examples: int
    tokens: int  # in the examples, shared prefixes counted each time
    stored: int
    trained: int


@dataclass(frozen=True, slots=True)
class TurnsCompared:
    """Both modes on the same rows."""

    rows: int
    turns: int  # turns with another context or text in faithful mode
    conversation: ModeTotals
    faithful: ModeTotals

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        more = self.faithful.trained - self.conversation.trained
        share = more / self.faithful.trained if self.faithful.trained else 0.0
        cost = self.faithful.tokens / self.conversation.tokens if self.conversation.tokens else 1.0
        if more <= 0:
            return (
                f"in the first {self.rows} rows the template rewrites {self.turns} turns once others follow, so "
                "they are trained in a form that inference never shows (--turns faithful costs "
                f"{cost:.1f} times the tokens of a run)"
            )
        return (
            f"in the first {self.rows} rows the template rewrites {self.turns} turns once others follow, and {more:,} "
            f"tokens that inference would produce are not trained ({share:.0%} of what --turns faithful trains, at "
            f"{cost:.1f} times the tokens of a run)"
        )


def compare_turns(
    recipe: Recipe, tokenizer_json: bytes, rows: Sequence[bytes], encoder: Encoder | None = None
) -> TurnsCompared:
    """Prepares rows in both modes; rejected rows count in neither."""
    rows = _affordable(rows, recipe.mapping.role_key)
    given = SliceRows(list(rows), [1] * len(rows))
    pipeline = Pipeline(replace(recipe, turns=TurnsMode.FAITHFUL), tokenizer_json, encoder=encoder)
    chains = pipeline.run(given).columns
    pipeline.recipe = replace(recipe, turns=TurnsMode.CONVERSATION)  # ignores the turns that its renderer adds
    totals = _totals(pipeline.run(given).columns), _totals(chains)
    roots = np.searchsorted(chains.rows, chains.rows, side="right") - 1
    turns = sum(_turns(chains, number) for number in np.flatnonzero(roots != np.arange(len(roots))).tolist())
    return TurnsCompared(len(np.unique(chains.rows)), turns, *totals)


def preview(recipe: Recipe, tokenizer_json: bytes, rows: Sequence[bytes], encoder: Encoder | None = None) -> str:
    """What to say about both modes after a build; never fails it, since the dataset is complete."""
    try:
        compared = compare_turns(recipe, tokenizer_json, rows, encoder)
    except Exception as error:
        return f"--turns faithful could not be previewed ({type(error).__name__}: {error})"
    return str(compared) if compared.turns else ""


def _affordable(rows: Sequence[bytes], role_key: str) -> list[bytes]:
    key = f'"{role_key}"'.encode()
    work = np.cumsum([len(row) * row.count(key) for row in rows])
    return list(rows[: int(np.searchsorted(work, _MOST_WORK, side="right"))])


def compare_stored(dataset: Dataset) -> TurnsCompared | None:
    """Compares both modes on the first rows of a dataset, read from its sources again.

    None where they don't differ (no reasoning is dropped, and no turn has a chain of its own), or where the first row
    is too long.
    """
    has_chains = any(dataset.shards.columns(shard).prefixes is not None for shard in range(len(dataset.shards)))
    if dataset.recipe.get("adopted") or not (has_chains or Note.REASONING_DROPPED in dataset.ledger.notes):
        return None
    if dataset.is_preference:
        return None
    tokenizer = read_regular(dataset.cache.tokenizer_path(dataset.recipe["tokenizer"]))
    rows = list(islice(ConversationReader(dataset).source_rows(), COMPARED_ROWS))
    compared = compare_turns(Recipe.from_json(dict(dataset.recipe)), tokenizer, rows)
    return compared if compared.rows else None


def _is_trained(columns: Columns) -> Any:
    return (columns.segment_roles == Role.ASSISTANT) & np.isin(columns.segment_parts, (*BODY_PARTS, Part.STOP))


def _totals(columns: Columns) -> ModeTotals:
    lengths = np.diff(columns.segment_ends.astype(np.int64), prepend=0)
    firsts = columns.segment_offsets[:-1][np.diff(columns.segment_offsets) > 0]
    filled = np.diff(columns.segment_offsets) > 0
    before = 0 if columns.prefixes is None else columns.prefixes[filled]
    lengths[firsts] = columns.segment_ends[firsts].astype(np.int64) - before
    trained = int(lengths[_is_trained(columns)].sum())
    return ModeTotals(columns.examples, columns.tokens, int(columns.id_offsets[-1]), trained)


def _turns(columns: Columns, number: int) -> int:
    own = slice(int(columns.segment_offsets[number]), int(columns.segment_offsets[number + 1]))
    return len(np.unique(columns.segment_messages[own][_is_trained(columns)[own]]))
