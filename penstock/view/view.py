"""A view: a dataset as a sequence of training examples, under settings chosen at load time.

A view has examples (`view[i]`), lengths, a ledger and a digest. It encodes and writes nothing: a view costs one scan of
the dataset's segments (`scan`), and an example a few tens of microseconds. A view is pickled as (dataset, settings);
its index is recomputed when needed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Protocol, Self, SupportsIndex, Unpack

import numpy as np
import numpy.typing as npt

from penstock.arguments import ViewArguments
from penstock.arrays import Int32, Int64
from penstock.store.columns import Columns
from penstock.view.empty import empty_view
from penstock.view.example import Cut, Example, Pair, cut_example
from penstock.view.examples import Examples, default_policy, is_labelled, place_of
from penstock.view.index.scan import Index, scan, trained_weights
from penstock.view.ledger import Ledger
from penstock.view.runs import Float32
from penstock.view.settings import ViewSettings, view_settings


class Served(Protocol):
    """The interface that packing and feeding need: a view, or a mixture of views."""

    @property
    def digest(self) -> str:
        """A stable name of the content and its settings."""
        ...

    @property
    def is_preference(self) -> bool:
        """Whether items are pairs."""
        ...

    @property
    def is_labelled(self) -> bool:
        """Whether each answer is labelled as desirable or not (KTO)."""
        ...

    @property
    def ledger(self) -> Ledger:
        """Where all rows and tokens went."""
        ...

    @property
    def lengths(self) -> Int32:
        """Tokens per item; for pairs, a column per side."""
        ...

    @property
    def trained_weights(self) -> Float32:
        """Per item of single examples, the sum of its predicted tokens' loss weights."""
        ...

    def epoch_indices(self, epoch: int) -> Int64:
        """The items of an epoch, in no particular order; a function of (seed, epoch) alone."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: SupportsIndex) -> Example | Pair: ...


def open_view(dataset: Examples, **options: Unpack[ViewArguments]) -> BaseView:
    """A view of the dataset, scanned immediately so that rows that can't be served raise here."""
    return BaseView(dataset, view_settings({"train_on": default_policy(dataset), **options})).filled()


class BaseView:
    """A sequence of examples or, for preference data, of pairs."""

    def __init__(self, dataset: Examples, settings: ViewSettings) -> None:
        self.dataset = dataset
        self.settings = settings

    def scanned(self) -> Self:
        """This view, with its index computed."""
        _ = self._index
        return self

    def filled(self) -> Self:
        """This view, scanned. Raises an error that names the cause if it has no examples."""
        if not len(self):
            raise empty_view(self.ledger, self.settings)
        return self

    def changed(self, **options: Unpack[ViewArguments]) -> Self:
        """The same dataset with some settings changed; nothing is scanned yet."""
        return type(self)(self.dataset, view_settings(options, self.settings))

    @property
    def is_preference(self) -> bool:
        """Whether items are pairs."""
        return self.dataset.is_preference

    @property
    def is_labelled(self) -> bool:
        """Whether each answer is labelled as desirable or not (KTO)."""
        return is_labelled(self.dataset)

    @property
    def digest(self) -> str:
        """A stable name for the dataset's content under these settings."""
        return self.settings.digest(self.dataset.key)

    @property
    def ledger(self) -> Ledger:
        """Where all rows and tokens went."""
        return self._index.ledger

    @property
    def lengths(self) -> Int32:
        """Tokens per item after truncation; for pairs, a column per side."""
        return self._index.lengths

    @property
    def numbers(self) -> npt.NDArray[np.integer]:
        """Per item, the number of its row in the dataset."""
        return self._index.rows

    @property
    def starts(self) -> Int32:
        """Per item, its start in its row."""
        return self._index.starts

    @property
    def prompts(self) -> Int32:
        """Per pair, the end of the common prompt in its row; empty for single examples."""
        return self._index.prompts

    @cached_property
    def trained_weights(self) -> Float32:
        """Per single example, the sum of its predicted tokens' loss weights. The first token is never predicted."""
        return trained_weights(self.dataset, self.settings, self._index)

    def epoch_indices(self, epoch: int) -> Int64:
        """Every item, once per epoch."""
        return np.arange(len(self), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._index.rows)

    def __getitem__(self, index: SupportsIndex) -> Example | Pair:
        return self.pair(index) if self.is_preference else self.example(index)

    def __iter__(self) -> Iterator[Example | Pair]:
        return (self[index] for index in range(len(self)))

    def example(self, index: SupportsIndex) -> Example:
        """The item of a view of single examples."""
        item = self._item(index)
        number, columns, local = self._find(item)
        start, length = int(self._index.starts[item]), int(self._index.lengths[item])
        place = place_of(self.dataset, number)
        found = cut_example(columns, local, Cut(start, start + length), self.settings.train_on, place, self.dataset)
        return found if columns.desirable is None else replace(found, desirable=bool(columns.desirable[local]))

    def pair(self, index: SupportsIndex) -> Pair:
        """The item of a view of preference data."""
        item = self._item(index)
        number, columns, local = self._find(item)
        start, prompt = int(self._index.starts[item]), int(self._index.prompts[item])
        lengths, policy = [int(length) for length in self._index.lengths[item]], self.settings.train_on
        place = place_of(self.dataset, number)
        chosen, rejected = (
            cut_example(columns, 2 * local + side, Cut(start, start + length, prompt), policy, place, self.dataset)
            for side, length in enumerate(lengths)
        )
        return Pair(chosen, rejected, prompt - start)

    def __reduce__(self) -> tuple[type[BaseView], tuple[Examples, ViewSettings]]:
        return type(self), (self.dataset, self.settings)

    def __repr__(self) -> str:
        return f"View({self.settings}, dataset={self.dataset.key})"

    @cached_property
    def _index(self) -> Index:
        return scan(self.dataset, self.settings)

    def _item(self, index: SupportsIndex) -> int:
        item = operator.index(index)
        if not -len(self) <= item < len(self):
            raise IndexError(f"item {item} of a view with {len(self)} items")
        return item % len(self)

    def _find(self, item: int) -> tuple[int, Columns, int]:
        """The item's row: its number in the dataset, its shard, and its number there."""
        number = int(self._index.rows[item])
        shard = int(np.searchsorted(self._index.bounds, number, side="right")) - 1
        return number, self.dataset.columns(shard), number - int(self._index.bounds[shard])
