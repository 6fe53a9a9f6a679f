"""What `--turns faithful` would change: both ways of rendering, on a sample of rows.

Nothing is stored. Costs the making of a pipeline, about half a second, and both ways for each row of the sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from penstock.build.recipe import Recipe
from penstock.build.slices.pipeline import Pipeline
from penstock.chat.conversation import Part, Role
from penstock.regions.modes import TurnsMode
from penstock.sources import SliceRows
from penstock.store.columns import Columns


@dataclass(frozen=True, slots=True)
class Way:
    """One way of rendering a sample."""

    examples: int
    tokens: int  # that a training run goes through
    stored: int
    trained: int


@dataclass(frozen=True, slots=True)
class TurnsCompared:
    """Both ways, on the same rows."""

    rows: int
    turns: int  # that are trained in another context, or with other words
    conversation: Way
    faithful: Way

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        more = self.faithful.trained - self.conversation.trained
        share = more / self.faithful.trained if self.faithful.trained else 0.0
        cost = self.faithful.tokens / self.conversation.tokens if self.conversation.tokens else 1.0
        return (
            f"in the first {self.rows} rows the template rewrites {self.turns} turns once others follow, and {more:,} "
            f"tokens that inference would produce are not trained ({share:.0%} of what --turns faithful trains, at "
            f"{cost:.1f} times the tokens of a run)"
        )


def compare_turns(recipe: Recipe, tokenizer_json: bytes, rows: Sequence[bytes]) -> TurnsCompared:
    """Prepare rows both ways; those that are rejected count in neither."""
    given = SliceRows(list(rows), [1] * len(rows))
    pipeline = Pipeline(replace(recipe, turns=TurnsMode.FAITHFUL), tokenizer_json)
    chains = pipeline.run(given).columns
    pipeline.recipe = replace(recipe, turns=TurnsMode.CONVERSATION)  # the turns that it renders are not looked at
    ways = _way(pipeline.run(given).columns), _way(chains)
    roots = np.searchsorted(chains.rows, chains.rows, side="right") - 1
    turns = sum(_turns(chains, number) for number in np.flatnonzero(roots != np.arange(len(roots))).tolist())
    return TurnsCompared(len(np.unique(chains.rows)), turns, *ways)


def faithful_columns(recipe: Recipe, tokenizer_json: bytes, row: bytes) -> Columns:
    """The chains of one row."""
    return Pipeline(replace(recipe, turns=TurnsMode.FAITHFUL), tokenizer_json).run(SliceRows([row], [1])).columns


def _words(columns: Columns) -> Any:
    return (columns.segment_roles == Role.ASSISTANT) & np.isin(columns.segment_parts, (Part.BODY, Part.STOP))


def _way(columns: Columns) -> Way:
    lengths = np.diff(columns.segment_ends.astype(np.int64), prepend=0)
    firsts = columns.segment_offsets[:-1][np.diff(columns.segment_offsets) > 0]
    filled = np.diff(columns.segment_offsets) > 0
    before = 0 if columns.prefixes is None else columns.prefixes[filled]
    lengths[firsts] = columns.segment_ends[firsts].astype(np.int64) - before
    trained = int(lengths[_words(columns)].sum())
    return Way(columns.examples, columns.tokens, int(columns.id_offsets[-1]), trained)


def _turns(columns: Columns, number: int) -> int:
    own = slice(int(columns.segment_offsets[number]), int(columns.segment_offsets[number + 1]))
    return len(np.unique(columns.segment_messages[own][_words(columns)[own]]))
