"""Mixtures: combine several views into one, with a given share of each per epoch.

Each view (or dataset) comes with a number of passes or examples per epoch. Packing and feeding read a mixture like a
view: items are numbered over all parts, and `epoch_indices(epoch)` lists the items of an epoch. The list depends only
on (seed, name of the part, epoch), so any epoch can be computed without the earlier ones.

A whole pass serves every item. A fractional pass samples without replacement: epochs walk through a shuffle of the part
until less than another fraction is left, then reshuffle. With 0.3, epochs 0, 1 and 2 are disjoint, and so are 3, 4
and 5. An epoch costs one shuffle per part with a fraction.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from numbers import Real
from typing import Final, NamedTuple, Self, SupportsIndex, Unpack

import numpy as np
import orjson
from blake3 import blake3

from penstock.arguments import ViewArguments
from penstock.arrays import Int32, Int64
from penstock.errors import UsageError, ViewError
from penstock.store.dataset import MemberRow
from penstock.view.empty import empty_view
from penstock.view.example import Example, Pair
from penstock.view.examples import Examples, default_policy
from penstock.view.index.keyed import keyed_permutation
from penstock.view.ledger import Ledger
from penstock.view.runs import Float32
from penstock.view.settings import ViewSettings
from penstock.view.view import BaseView

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
    return part if isinstance(part, BaseView) else BaseView(part, ViewSettings(train_on=default_policy(part)))


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
