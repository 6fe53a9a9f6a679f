"""What a view serves: one example, or a pair of them, as numpy arrays of equal length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from penstock.arrays import Bool, Int64
from penstock.load.options import LossPolicy, ViewOptions
from penstock.load.policy import Float32, Runs, run_weights
from penstock.notebook import html
from penstock.prepare.encode.columns import Columns
from penstock.prepare.faithful.prefixes import tokens
from penstock.store.dataset import RowLocation

# ---- examples --------------------------------------------------------------------------------------------------------
#
# The interface that views need from a dataset.
#
# Datasets in the cache implement `Examples`, and so does `memory.MemoryExamples`. Columns are read one shard at a time,
# so a view needs memory only for its index.


class Examples(Protocol):
    """A prepared dataset. Token sequences are numbered over all shards in order; the sides of a pair are adjacent."""

    @property
    def key(self) -> str:
        """The content key."""
        ...

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Every input that determines the tokens. Datasets with equal `recipe["tokenizer"]` share a vocabulary."""
        ...

    @property
    def is_preference(self) -> bool:
        """Whether examples come in pairs (chosen, rejected)."""
        ...

    @property
    def shard_examples(self) -> npt.NDArray[np.int64]:
        """Token sequences per shard (a pair counts as two), in order."""
        ...

    def columns(self, shard: int, /) -> Columns:
        """The columns of one shard."""
        ...

    def structure(self, shard: int, /) -> Columns:
        """The columns of one shard, perhaps without `ids`, which need not be read to scan single examples."""
        ...

    def fetch(self, shards: Iterable[int], /) -> None:
        """Download shards that are not on this machine, many at a time."""
        ...

    def shard_bytes(self, shard: int, /) -> int:
        """The size of a shard's file."""
        ...

    @property
    def download_bytes(self) -> int:
        """Bytes of shards to download ahead of their use; 0 if all shards are on this machine."""
        ...

    def locate(self, example: int, /) -> RowLocation:
        """The source and row of a token sequence."""
        ...

    def __len__(self) -> int:
        """The number of rows: examples, or pairs."""
        ...


def is_labelled(examples: Examples) -> bool:
    """Whether each answer has a KTO label (`Columns.desirable`)."""
    mapping = examples.recipe.get("mapping") or {}
    return bool(mapping.get("format") == "kto")


def resolved_view(examples: Examples, options: ViewOptions) -> ViewOptions:
    """The same options with the loss policy that fits the dataset, if none is given."""
    return options if options.train_on is not None else replace(options, train_on=default_policy(examples))


def default_policy(examples: Examples) -> LossPolicy:
    """What a view trains unless told: the rows' own mask of adopted data, the labelled answer of KTO data."""
    if examples.recipe.get("adopted"):
        return LossPolicy.CUSTOMIZED
    return LossPolicy.LAST_ASSISTANT_MESSAGE if is_labelled(examples) else LossPolicy.ALL_ASSISTANT_MESSAGES


def place_of(examples: Examples, row: int) -> RowLocation:
    """The source and row that a row of the dataset (an example or a pair) comes from."""
    return examples.locate(2 * row if examples.is_preference else row)


def named(place: RowLocation) -> str:
    """A row location as text for error messages."""
    return f"row {place.row} of source {place.source}"


# ---- example ---------------------------------------------------------------------------------------------------------


IGNORED: Final = -100  # the label that trainers exclude from the loss


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Example:
    """One token sequence with its loss weights. Labels are not shifted; the model shifts them."""

    input_ids: Int64
    loss_weights: Float32
    row: RowLocation
    start: int  # offset of the sequence in its row; above 0 after truncate_left and split
    runs: Runs  # the message and part of each token; runs outside the window are kept, with length 0
    desirable: bool | None = None  # KTO's label
    dataset: Examples | None = None  # lets notebooks show text; never pickled

    @property
    def loss_mask(self) -> Bool:
        """Which tokens are trained."""
        return self.loss_weights > 0

    @property
    def labels(self) -> Int64:
        """The ids where trained, -100 elsewhere."""
        return np.where(self.loss_mask, self.input_ids, IGNORED)

    def __len__(self) -> int:
        return len(self.input_ids)

    def __repr__(self) -> str:
        label = "" if self.desirable is None else f", desirable={self.desirable}"
        return f"Example({len(self):,} tokens, {int(self.loss_mask.sum()):,} trained, row={self.row}{label})"

    def __reduce__(self) -> tuple[Callable[..., Example], tuple[Any, ...]]:
        return Example, (self.input_ids, self.loss_weights, self.row, self.start, self.runs, self.desirable)

    def _repr_html_(self) -> str | None:
        return html(self)


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two answers to one prompt. Both sides start with the same `prompt_length` tokens, which are not trained."""

    chosen: Example
    rejected: Example
    prompt_length: int

    @property
    def row(self) -> RowLocation:
        """Where the pair comes from."""
        return self.chosen.row

    def _repr_html_(self) -> str | None:
        return html(self)


@dataclass(frozen=True, slots=True)
class Cut:
    """The tokens start:end of a row that become an example, trained from `trained_from` onwards."""

    start: int
    end: int
    trained_from: int = 0


def cut_example(
    columns: Columns, number: int, cut: Cut, policy: LossPolicy, row: RowLocation, dataset: Examples | None = None
) -> Example:
    """Cut a window out of example `number` of a shard. The policy weights the whole row before the cut."""
    runs = Runs.of(columns, number, number + 1)
    weights = run_weights(policy, runs)
    runs = runs._replace(ends=np.minimum(np.maximum(runs.ends, cut.start), cut.end) - cut.start)
    loss_weights = weights.repeat(runs.lengths)
    if cut.trained_from > cut.start:
        loss_weights[: cut.trained_from - cut.start] = 0
    ids = tokens(columns, number, cut.start, cut.end).astype(np.int64)
    return Example(ids, loss_weights, row, cut.start, runs, dataset=dataset)
