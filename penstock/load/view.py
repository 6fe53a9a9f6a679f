"""A view: a dataset as a sequence of training examples, under settings chosen at load time.

A view has examples (`view[i]`), lengths, a ledger and a digest. It encodes and writes nothing: a view costs one scan of
the dataset's segments (`scan`), and an example a few tens of microseconds. A view is pickled as (dataset, settings);
its index is recomputed when needed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from numbers import Real
from typing import Final, NamedTuple, Protocol, Self, SupportsIndex, Unpack

import numpy as np
import numpy.typing as npt
import orjson
from blake3 import blake3

from penstock.arguments import ViewArguments
from penstock.arrays import Int32, Int64
from penstock.errors import UsageError, ViewError
from penstock.load.example import Cut, Example, Examples, Pair, cut_example, is_labelled, place_of, resolved_view
from penstock.load.index import Index, keyed_permutation, scan, trained_weights
from penstock.load.options import HoldoutSide, ViewOptions, view_options
from penstock.load.policy import Float32
from penstock.load.windows import Ledger, Reason
from penstock.prepare.encode.columns import Columns
from penstock.store.dataset import MemberRow

# ---- empty -----------------------------------------------------------------------------------------------------------
#
# The error for a view without examples: names the options that dropped its rows, and how many each dropped.


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
        case Reason.NO_TRAINED_TOKEN | Reason.CHUNK_WITHOUT_TRAINED_TOKEN:
            limit = f" within max_length={settings.max_length}" if settings.max_length is not None else ""
            remedy = "raise it, or use overlong='truncate_left'" if limit else "use another train_on"
            return f"{count:,} have no token that train_on={settings.policy.value!r} trains{limit}: {remedy}"


# ---- view ------------------------------------------------------------------------------------------------------------


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
    def max_length(self) -> int | None:
        """The maximum length that all views share, if any."""
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
    return BaseView(dataset, view_options(options)).filled()


class BaseView:
    """A sequence of examples or, for preference data, of pairs."""

    def __init__(self, dataset: Examples, settings: ViewOptions) -> None:
        self.dataset = dataset
        self.settings = resolved_view(dataset, settings)

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
        return type(self)(self.dataset, view_options(options, self.settings))

    @property
    def max_length(self) -> int | None:
        """The maximum length of examples."""
        return self.settings.max_length

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
        found = cut_example(columns, local, Cut(start, start + length), self.settings.policy, place, self.dataset)
        return found if columns.desirable is None else replace(found, desirable=bool(columns.desirable[local]))

    def pair(self, index: SupportsIndex) -> Pair:
        """The item of a view of preference data."""
        item = self._item(index)
        number, columns, local = self._find(item)
        start, prompt = int(self._index.starts[item]), int(self._index.prompts[item])
        lengths, policy = [int(length) for length in self._index.lengths[item]], self.settings.policy
        place = place_of(self.dataset, number)
        chosen, rejected = (
            cut_example(columns, 2 * local + side, Cut(start, start + length, prompt), policy, place, self.dataset)
            for side, length in enumerate(lengths)
        )
        return Pair(chosen, rejected, prompt - start)

    def __reduce__(self) -> tuple[type[BaseView], tuple[Examples, ViewOptions]]:
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


_MOST_PASSES: Final = 1000  # a larger number is probably meant as a number of examples


class Count(NamedTuple):
    """A fixed number of examples per epoch, whatever the size of the dataset."""

    examples: int


class Share(NamedTuple):
    """A part of a mixture: a view, and how much of it an epoch serves (passes, or a count)."""

    view: BaseView
    amount: float | Count

    @property
    def per_epoch(self) -> int:
        """Items per epoch; the same in every epoch."""
        if isinstance(self.amount, Count):
            return self.amount.examples
        return math.floor(self.amount * len(self.view) + 0.5)


Part = Examples | BaseView


def mix(parts: Mapping[str, tuple[Part, float | Count]], seed: int = 0) -> BaseMixture:
    """A mixture of datasets or views: `{"chat": (chat, 1.0), "tools": (tools, 0.3), "extra": (extra, Count(500))}`.

    A number is passes per epoch; `Count` is examples per epoch. Datasets get the default view; `.view(…)` changes it.
    """
    unchecked: object = parts
    if not isinstance(unchecked, Mapping):
        raise UsageError(
            f"a mixture is a dict of names, not a {type(unchecked).__name__}. "
            'Write ps.mix({"chat": (chat, 1.0), "tools": (tools, 0.3)}), with the passes per epoch of each.'
        )
    if not parts:
        raise UsageError("the mixture is empty. Give at least one name with (dataset, passes per epoch).")
    for name, given in unchecked.items():
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            kind = type(given).__name__
            raise UsageError(
                f"part {name!r}: expected (dataset or view, passes per epoch), found a {kind}. Write (…, 1.0)."
            )
        if not isinstance(given[0], BaseView) and not hasattr(type(given[0]), "shard_examples"):
            raise UsageError(f"part {name!r}: expected a dataset or a view, found {given[0]!r:.60}.")
    shares = {name: Share(_as_view(part), _amount(name, amount)) for name, (part, amount) in parts.items()}
    _check_alike(shares)
    return BaseMixture(shares, seed)


class BaseMixture:
    """Several views as one sequence, with the items of each epoch."""

    def __init__(self, shares: Mapping[str, Share], seed: int) -> None:
        self.shares = dict(shares)
        self.seed = seed

    def view(self, **options: Unpack[ViewArguments]) -> Self:
        """The same mixture with these options changed in every part. All parts are scanned immediately."""
        changed = {name: Share(share.view.changed(**options), share.amount) for name, share in self.shares.items()}
        mixture = type(self)(changed, self.seed)
        _ = mixture._bounds
        return mixture

    @property
    def is_preference(self) -> bool:
        """Whether items are pairs."""
        return next(iter(self.shares.values())).view.is_preference

    @property
    def is_labelled(self) -> bool:
        """Whether each answer is labelled as desirable or not (KTO)."""
        return next(iter(self.shares.values())).view.is_labelled

    @property
    def max_length(self) -> int | None:
        """The maximum length that all views share, if any."""
        limits = {share.view.max_length for share in self.shares.values()}
        return limits.pop() if len(limits) == 1 else None

    @property
    def digest(self) -> str:
        """A stable name for the parts, their amounts and the seed."""
        parts = [[name, share.view.digest, _plain(share.amount)] for name, share in self.shares.items()]
        return f"b3-{blake3(orjson.dumps({'mixture': 1, 'seed': self.seed, 'parts': parts})).hexdigest()}"

    @property
    def ledger(self) -> Ledger:
        """The sum of the parts' ledgers; each part counts once, whatever its number of passes."""
        return sum((share.view.ledger for share in self.shares.values()), Ledger())

    @cached_property
    def lengths(self) -> Int32:
        """Tokens per item; for pairs, a column per side."""
        return np.concatenate([share.view.lengths for share in self.shares.values()])

    @cached_property
    def trained_weights(self) -> Float32:
        """Per item of single examples, the sum of its predicted tokens' loss weights."""
        return np.concatenate([share.view.trained_weights for share in self.shares.values()])

    def epoch_indices(self, epoch: int) -> Int64:
        """The items of an epoch, part by part; with two passes, each item appears twice."""
        if epoch < 0:
            raise UsageError(f"epoch {epoch} does not exist. Epochs count from 0.")
        chosen = [self._chosen(name, epoch) for name in self.shares]
        return np.concatenate([items + first for items, first in zip(chosen, self._bounds, strict=False)])

    def place(self, index: SupportsIndex) -> tuple[str, int]:
        """The part that an item belongs to, and its number there."""
        item = operator.index(index)
        if not -len(self) <= item < len(self):
            raise IndexError(f"item {item} of a mixture with {len(self)} items")
        item %= len(self)
        part = int(np.searchsorted(self._bounds, item, side="right")) - 1
        return list(self.shares)[part], item - int(self._bounds[part])

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __getitem__(self, index: SupportsIndex) -> Example | Pair:
        name, item = self.place(index)
        found = self.shares[name].view[item]
        if isinstance(found, Example):
            return replace(found, row=MemberRow.of(found.row, name))
        row = MemberRow.of(found.row, name)
        return replace(found, chosen=replace(found.chosen, row=row), rejected=replace(found.rejected, row=row))

    def __iter__(self) -> Iterator[Example | Pair]:
        return (self[index] for index in range(len(self)))

    def __reduce__(self) -> tuple[type[BaseMixture], tuple[dict[str, Share], int]]:
        return type(self), (self.shares, self.seed)

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}: {share.amount}" for name, share in self.shares.items())
        return f"Mixture({parts}, seed={self.seed})"

    @cached_property
    def _bounds(self) -> Int64:
        """Items before each part, and the total."""
        for name, share in self.shares.items():
            if not len(share.view):
                raise ViewError(f"part {name!r} of the mixture: {empty_view(share.view.ledger, share.view.settings)}")
            if not share.per_epoch:
                raise ViewError(
                    f"part {name!r} of the mixture gives no example: its view has {len(share.view)} and an epoch "
                    f"takes {share.amount} of them. Raise the amount, or leave the part out."
                )
        return np.concatenate(([0], np.cumsum([len(share.view) for share in self.shares.values()], dtype=np.int64)))

    def _chosen(self, name: str, epoch: int) -> Int64:
        size = len(self.shares[name].view)
        passes, rest = divmod(self.shares[name].per_epoch, size)
        whole = np.tile(np.arange(size), passes)
        if not rest:
            return whole
        lap, turn = divmod(epoch, size // rest)
        shuffled = keyed_permutation(size, _key(self.seed, name, lap))
        return np.concatenate((whole, np.sort(shuffled[turn * rest : (turn + 1) * rest])))


def _key(seed: int, name: str, lap: int) -> int:
    """The key of one shuffle of one part; the name keeps parts of equal size from being shuffled alike."""
    return int.from_bytes(blake3(orjson.dumps([seed, name, lap])).digest(8), "little")


def _as_view(part: Part) -> BaseView:
    return part if isinstance(part, BaseView) else BaseView(part, ViewOptions())


def _plain(amount: float | Count) -> object:
    return {"count": amount.examples} if isinstance(amount, Count) else float(amount)


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


def _check_alike(shares: Mapping[str, Share]) -> None:
    """Check that all parts share a vocabulary and a kind of item."""
    first_name, first = next(iter(shares.items()))
    for name, share in shares.items():
        if share.view.dataset.recipe["tokenizer"] != first.view.dataset.recipe["tokenizer"]:
            raise UsageError(
                f"{name!r} and {first_name!r} have different tokenizers, so their ids mean different text. "
                "Prepare both with the same tokenizer."
            )
        if share.view.is_preference != first.view.is_preference:
            raise UsageError(f"one of {name!r} and {first_name!r} holds preference pairs and the other does not.")
        if share.view.is_labelled != first.view.is_labelled:
            raise UsageError(
                f"one of {name!r} and {first_name!r} holds labelled answers (KTO) and the other does not. "
                "Prepare it with --format prompt_completion or messages to ignore its labels."
            )
