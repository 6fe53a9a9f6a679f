"""What is trained on: a view is a dataset under a loss policy, a maximum length and a hold-out; a mixture is several.

Both are sequences of examples or, for preference data, of pairs (`served[i]`), with lengths, a ledger and a digest.
They encode and write nothing: a view costs one scan of the dataset's segments, and an example a few tens of
microseconds. A view is pickled as (dataset, settings); its index is recomputed when needed.
"""

from __future__ import annotations

import math
import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Final, NamedTuple, Self, SupportsIndex, Unpack

import numpy as np
import orjson
from blake3 import blake3

from penstock import surface
from penstock.arguments import ExportArguments, LoaderArguments, ViewArguments
from penstock.arrays import Int32, Int64
from penstock.digests import bytes_digest
from penstock.errors import UsageError, ViewError
from penstock.load.example import Cut, Example, Pair, cut_example, place_of, resolved_view
from penstock.load.index import Index, keyed_permutation, scan, trained_weights, with_parts
from penstock.load.options import ViewOptions, view_options
from penstock.load.policy import Float32
from penstock.load.windows import Ledger, empty_view
from penstock.prepare.encode.columns import Columns
from penstock.store.dataset import Dataset, MemberRow

if TYPE_CHECKING:
    import datasets

    from penstock.surface import Exported, Loader, OnExported, Stats


_MOST_PASSES: Final = 1000  # a larger number is probably meant as a number of examples


class Count(NamedTuple):
    """A fixed number of examples per epoch, whatever the size of the dataset."""

    examples: int


class Member(NamedTuple):
    """A view, and how much of it an epoch serves: passes, a count, or None for a view by itself."""

    view: View
    amount: float | Count | None

    @property
    def per_epoch(self) -> int:
        """Items per epoch; the same in every epoch."""
        if isinstance(self.amount, Count):
            return self.amount.examples
        return math.floor((1.0 if self.amount is None else self.amount) * len(self.view) + 0.5)


class Served(ABC):
    """A view, or a mixture of views: what is packed, fed, exported and looked at. A view is its own only member."""

    seed: int | None = None
    in_order = False  # whether an epoch is every item once, in order

    @property
    def single(self) -> View | None:
        """The view itself, if this is one."""
        return None

    @property
    @abstractmethod
    def members(self) -> Mapping[str, Member]:
        """The views by name, each with the amount that an epoch serves."""

    @property
    def views(self) -> list[View]:
        """The members' views, in order."""
        return [member.view for member in self.members.values()]

    @property
    def is_preference(self) -> bool:
        """Whether items are pairs."""
        return self.views[0].dataset.is_preference

    @property
    def is_labelled(self) -> bool:
        """Whether each answer is labelled as desirable or not (KTO)."""
        return self.views[0].dataset.is_labelled

    @property
    def max_length(self) -> int | None:
        """The maximum length of examples, if all views share one."""
        limits = {view.settings.max_length for view in self.views}
        return limits.pop() if len(limits) == 1 else None

    @property
    @abstractmethod
    def digest(self) -> str:
        """A stable name of the content under these settings."""

    @property
    def dataset_keys(self) -> str | dict[str, str]:
        """The key of a view's dataset; of a mixture, one per member."""
        if self.single is not None:
            return self.single.dataset.key
        return {name: member.view.dataset.key for name, member in self.members.items()}

    @property
    def source_names(self) -> list[str]:
        """What losses and statistics are told apart by: the members, or a single dataset's files if they are known."""
        return list(self.members) if len(self.members) > 1 else self.views[0].dataset.source_names

    @property
    def ledger(self) -> Ledger:
        """Where all rows and tokens went; each member counts once, whatever its number of passes."""
        return sum((view.ledger for view in self.views), Ledger())

    @cached_property
    def lengths(self) -> Int32:
        """Tokens per item after truncation; for pairs, a column per side."""
        return np.concatenate([view.lengths for view in self.views])

    @cached_property
    def trained_weights(self) -> Float32:
        """Per single example, the sum of its predicted tokens' loss weights. The first token is never predicted."""
        return np.concatenate([view.trained_weights for view in self.views])

    @property
    def varies(self) -> bool:
        """Whether the items differ from epoch to epoch."""
        return any(member.per_epoch % len(member.view) for member in self.members.values())

    @abstractmethod
    def epoch_indices(self, epoch: int) -> Int64:
        """The items of an epoch, in no particular order; a function of (seed, epoch) alone."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: SupportsIndex) -> Example | Pair: ...

    def __iter__(self) -> Iterator[Example | Pair]:
        return (self[index] for index in range(len(self)))

    def place(self, index: SupportsIndex) -> tuple[str, int]:
        """The member that an item belongs to, and its number there."""
        item, bounds = self._item(index), self.bounds
        member = int(np.searchsorted(bounds, item, side="right")) - 1
        return list(self.members)[member], item - int(bounds[member])

    @property
    def bounds(self) -> Int64:
        """Items before each member, and the total."""
        return np.concatenate(([0], np.cumsum([len(view) for view in self.views], dtype=np.int64)))

    def _item(self, index: SupportsIndex) -> int:
        item = operator.index(index)
        if not -len(self) <= item < len(self):
            raise IndexError(f"item {item} of a {type(self).__name__.lower()} with {len(self)} items")
        return item % len(self)

    # -- use ------------------------------------------------------------------------------------------------------

    def loader(self, **options: Unpack[LoaderArguments]) -> Loader:
        """Iterate over batches, prefetched in the background and resumable at any step."""
        return surface.loader(self, options)

    def export(
        self,
        to: str,
        folder: str | os.PathLike[str],
        on_progress: OnExported | None = None,
        **options: Unpack[ExportArguments],
    ) -> Exported:
        """Write an epoch in another trainer's format; a killed export resumes where it stopped."""
        return surface.export(self, to, folder, on_progress, options)

    def to_hf(self, *, capacity: int | None = None) -> datasets.Dataset:
        """A `datasets.Dataset` over the mapped shards: it stores row numbers and reads rows on access."""
        return surface.to_hf(self, capacity)

    def stats(self, capacity: int | None = None) -> Stats:
        """Statistics of the rows that are served, each member counted once, whatever its passes."""
        return surface.stats(self, capacity)

    def _repr_html_(self) -> str | None:
        return surface.html(self)


# ---- views -----------------------------------------------------------------------------------------------------------


def open_view(dataset: Dataset, options: ViewOptions) -> View:
    """A view of the dataset, scanned immediately: raises an error that names the cause if it has no examples."""
    view = View(dataset, options)
    if not len(view):
        raise empty_view(view.index.ledger, view.settings)
    return view


class View(Served):
    """A dataset under a loss policy, a maximum length and a hold-out."""

    in_order = True

    def __init__(self, dataset: Dataset, settings: ViewOptions) -> None:
        self.dataset = dataset
        self.settings = resolved_view(dataset, settings)

    def with_options(self, **options: Unpack[ViewArguments]) -> Self:
        """The same dataset with these options changed."""
        return type(self)(self.dataset, view_options(options, self.settings))

    @property
    def single(self) -> View:
        """This view."""
        return self

    @property
    def members(self) -> Mapping[str, Member]:
        """This view alone, without a name."""
        return {"": Member(self, None)}

    @property
    def digest(self) -> str:
        """A stable name for the dataset's content under these settings."""
        return self.settings.digest(self.dataset.key)

    @cached_property
    def ledger(self) -> Ledger:
        """Where all rows and tokens went."""
        return with_parts(self.dataset, self.settings, self.index)

    @property
    def lengths(self) -> Int32:
        """Tokens per item after truncation; for pairs, a column per side."""
        return self.index.lengths

    @cached_property
    def trained_weights(self) -> Float32:
        """Per single example, the sum of its predicted tokens' loss weights. The first token is never predicted."""
        return trained_weights(self.dataset, self.settings, self.index)

    @property
    def varies(self) -> bool:
        """Never: an epoch is every item once."""
        return False

    def epoch_indices(self, epoch: int) -> Int64:
        """Every item, once per epoch."""
        return np.arange(len(self), dtype=np.int64)

    @cached_property
    def index(self) -> Index:
        """Where each item is found in the dataset."""
        return scan(self.dataset, self.settings)

    def __len__(self) -> int:
        return len(self.index.rows)

    def __getitem__(self, index: SupportsIndex) -> Example | Pair:
        return self.pair(index) if self.is_preference else self.example(index)

    def example(self, index: SupportsIndex) -> Example:
        """The item of a view of single examples."""
        item = self._item(index)
        number, columns, local = self._find(item)
        start, length = int(self.index.starts[item]), int(self.index.lengths[item])
        place = place_of(self.dataset, number)
        found = cut_example(columns, local, Cut(start, start + length), self.settings.mask, place, self.dataset)
        return found if columns.desirable is None else replace(found, desirable=bool(columns.desirable[local]))

    def pair(self, index: SupportsIndex) -> Pair:
        """The item of a view of preference data."""
        item = self._item(index)
        number, columns, local = self._find(item)
        start, prompt = int(self.index.starts[item]), int(self.index.prompts[item])
        lengths, mask = [int(length) for length in self.index.lengths[item]], self.settings.mask
        place = place_of(self.dataset, number)
        chosen, rejected = (
            cut_example(columns, 2 * local + side, Cut(start, start + length, prompt), mask, place, self.dataset)
            for side, length in enumerate(lengths)
        )
        return Pair(chosen, rejected, prompt - start)

    def __reduce__(self) -> tuple[type[View], tuple[Dataset, ViewOptions]]:
        return type(self), (self.dataset, self.settings)

    def __repr__(self) -> str:
        return f"View({self.settings}, dataset={self.dataset.key})"

    def _find(self, item: int) -> tuple[int, Columns, int]:
        """The item's row: its number in the dataset, its shard, and its number there."""
        number = int(self.index.rows[item])
        shard = int(np.searchsorted(self.index.bounds, number, side="right")) - 1
        return number, self.dataset.shards.columns(shard), number - int(self.index.bounds[shard])


# ---- mixture ---------------------------------------------------------------------------------------------------------
# Mixtures: combine several views into one, with a given share of each per epoch.
#
# Each view (or dataset) comes with a number of passes or examples per epoch. Packing and feeding read a mixture like a
# view: items are numbered over all parts, and `epoch_indices(epoch)` lists the items of an epoch. The list depends only
# on (seed, name of the part, epoch), so any epoch can be computed without the earlier ones.
#
# A whole pass serves every item. A fractional pass samples without replacement: epochs walk through a shuffle of the
# part until less than another fraction is left, then reshuffle. With 0.3, epochs 0, 1 and 2 are disjoint, and so are 3,
# 4 and 5. An epoch costs one shuffle per part with a fraction.


def mix(members: Mapping[str, tuple[Dataset | View, float | Count]], seed: int = 0) -> Mixture:
    """Mix datasets or views: `{"chat": (chat, 1.0), "tools": (tools, 0.3), "extra": (extra, Count(500))}`.

    A number means passes per epoch (0.3 is a different 30% each epoch); `Count` means examples per epoch. Datasets get
    the default view.
    """
    unchecked: object = members
    if not isinstance(unchecked, Mapping):
        raise UsageError(
            f"a mixture is a dict of names, not a {type(unchecked).__name__}. "
            'Write ps.mix({"chat": (chat, 1.0), "tools": (tools, 0.3)}), with the passes per epoch of each.'
        )
    if not members:
        raise UsageError("the mixture is empty. Give at least one name with (dataset, passes per epoch).")
    for name, given in unchecked.items():
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            kind = type(given).__name__
            raise UsageError(
                f"part {name!r}: expected (dataset or view, passes per epoch), found a {kind}. Write (…, 1.0)."
            )
        if not isinstance(given[0], View | Dataset):
            raise UsageError(f"part {name!r}: expected a dataset or a view, found {given[0]!r:.60}.")
    mixed = {
        name: Member(given if isinstance(given, View) else View(given, ViewOptions()), _amount(name, amount))
        for name, (given, amount) in members.items()
    }
    _check_alike(mixed)
    return Mixture(mixed, seed)


class Mixture(Served):
    """Several views combined, with a share of each per epoch."""

    seed: int

    def __init__(self, members: Mapping[str, Member], seed: int) -> None:
        self._members = dict(members)
        self.seed = seed

    @property
    def members(self) -> Mapping[str, Member]:
        """The views by name, each with the passes or examples that an epoch serves."""
        return self._members

    def with_options(self, **options: Unpack[ViewArguments]) -> Self:
        """The same mixture with these options changed in every member. All members are scanned immediately."""
        changed = {name: Member(view.with_options(**options), amount) for name, (view, amount) in self.members.items()}
        mixture = type(self)(changed, self.seed)
        _ = mixture.bounds
        return mixture

    @property
    def digest(self) -> str:
        """A stable name for the members, their amounts and the seed."""
        parts = [[name, view.digest, _plain(amount)] for name, (view, amount) in self.members.items()]
        return bytes_digest(orjson.dumps({"mixture": 1, "seed": self.seed, "parts": parts}))

    def epoch_indices(self, epoch: int) -> Int64:
        """The items of an epoch, member by member; with two passes, each item appears twice."""
        if epoch < 0:
            raise UsageError(f"epoch {epoch} does not exist. Epochs count from 0.")
        chosen = [self._chosen(name, epoch) for name in self.members]
        return np.concatenate([items + first for items, first in zip(chosen, self.bounds, strict=False)])

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __getitem__(self, index: SupportsIndex) -> Example | Pair:
        name, item = self.place(index)
        found = self.members[name].view[item]
        row = MemberRow.of(found.row, name)
        if isinstance(found, Example):
            return replace(found, row=row)
        return replace(found, chosen=replace(found.chosen, row=row), rejected=replace(found.rejected, row=row))

    def __reduce__(self) -> tuple[type[Mixture], tuple[dict[str, Member], int]]:
        return type(self), (self._members, self.seed)

    def __repr__(self) -> str:
        members = ", ".join(f"{name}: {member.amount}" for name, member in self.members.items())
        return f"Mixture({members}, seed={self.seed})"

    @cached_property
    def bounds(self) -> Int64:
        """Items before each member, and the total."""
        for name, member in self.members.items():
            view = member.view
            if not len(view):
                raise ViewError(f"part {name!r} of the mixture: {empty_view(view.ledger, view.settings)}")
            if not member.per_epoch:
                raise ViewError(
                    f"part {name!r} of the mixture gives no example: its view has {len(view)} and an epoch "
                    f"takes {member.amount} of them. Raise the amount, or leave the part out."
                )
        return super().bounds

    def _chosen(self, name: str, epoch: int) -> Int64:
        size = len(self.members[name].view)
        passes, rest = divmod(self.members[name].per_epoch, size)
        whole = np.tile(np.arange(size), passes)
        if not rest:
            return whole
        lap, turn = divmod(epoch, size // rest)
        shuffled = keyed_permutation(size, _key(self.seed, name, lap))
        return np.concatenate((whole, np.sort(shuffled[turn * rest : (turn + 1) * rest])))


def _key(seed: int, name: str, lap: int) -> int:
    """The key of one shuffle of one part; the name keeps parts of equal size from being shuffled alike."""
    return int.from_bytes(blake3(orjson.dumps([seed, name, lap])).digest(8), "little")


def _plain(amount: float | Count | None) -> object:
    return {"count": amount.examples} if isinstance(amount, Count) else amount


def _amount(name: str, amount: float | Count) -> float | Count:
    if isinstance(amount, Count):
        if amount.examples < 1:
            raise UsageError(f"part {name!r}: {amount} is not a valid number of examples. Use 1 or more.")
        return amount
    number: object = amount
    if isinstance(number, bool) or not isinstance(number, Real) or not 0 < amount <= _MOST_PASSES:
        raise UsageError(
            f"part {name!r}: {amount!r} is not a valid number of passes per epoch (above 0, at most {_MOST_PASSES}). "
            "For a number of examples, write Count(5000)."
        )
    return float(amount)


def _check_alike(members: Mapping[str, Member]) -> None:
    """Check that all parts share a vocabulary and a kind of item."""
    first_name, first = next(iter(members.items()))
    for name, member in members.items():
        if member.view.dataset.recipe["tokenizer"] != first.view.dataset.recipe["tokenizer"]:
            raise UsageError(
                f"{name!r} and {first_name!r} have different tokenizers, so their ids mean different text. "
                "Prepare both with the same tokenizer."
            )
        if member.view.is_preference != first.view.is_preference:
            raise UsageError(f"one of {name!r} and {first_name!r} holds preference pairs and the other does not.")
        if member.view.is_labelled != first.view.is_labelled:
            raise UsageError(
                f"one of {name!r} and {first_name!r} holds labelled answers (KTO) and the other does not. "
                "Prepare it with --format prompt_completion or messages to ignore its labels."
            )
