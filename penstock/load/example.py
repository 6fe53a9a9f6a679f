"""What a view serves: one example, or a pair of them, as numpy arrays of equal length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from penstock.arrays import Bool, Int64
from penstock.load.options import LossMask, LossPolicy, ViewOptions
from penstock.load.policy import Float32, Runs, run_weights
from penstock.prepare.encode.columns import Columns
from penstock.prepare.faithful.prefixes import tokens
from penstock.store.dataset import Dataset, RowLocation
from penstock.surface import html


def resolved_view(dataset: Dataset, options: ViewOptions) -> ViewOptions:
    """The same options with the loss policy that fits the dataset, if none is given."""
    return options if options.train_on is not None else replace(options, train_on=default_policy(dataset))


def default_policy(dataset: Dataset) -> LossPolicy:
    """What a view trains unless told: the rows' own mask of adopted data, the labelled answer of KTO data."""
    if dataset.recipe.get("adopted"):
        return LossPolicy.CUSTOMIZED
    return LossPolicy.LAST_ASSISTANT_MESSAGE if dataset.is_labelled else LossPolicy.ALL_ASSISTANT_MESSAGES


def place_of(dataset: Dataset, row: int) -> RowLocation:
    """The source and row that a row of the dataset (an example or a pair) comes from."""
    return dataset.locate(2 * row if dataset.is_preference else row)


def named(dataset: Dataset, row: int) -> str:
    """Where a row of the dataset comes from, for error messages: of a run of small files, the file."""
    place = place_of(dataset, row)
    name, number = dataset.file_row(*place)
    is_run = name != dataset.source_name(place.source)
    return f"row {number} of {name}" if is_run else f"row {place.row} of source {place.source}"


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
    dataset: Dataset | None = None  # lets notebooks show text; never pickled

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
    columns: Columns, number: int, cut: Cut, mask: LossMask, row: RowLocation, dataset: Dataset | None = None
) -> Example:
    """Cut a window out of example `number` of a shard. The mask weights the whole row before the cut."""
    runs = Runs.of(columns, number, number + 1)
    weights = run_weights(mask, runs)
    runs = runs._replace(ends=np.minimum(np.maximum(runs.ends, cut.start), cut.end) - cut.start)
    loss_weights = weights.repeat(runs.lengths)
    if cut.trained_from > cut.start:
        loss_weights[: cut.trained_from - cut.start] = 0
    ids = tokens(columns, number, cut.start, cut.end).astype(np.int64)
    return Example(ids, loss_weights, row, cut.start, runs, dataset=dataset)
