"""Statistics of a dataset, a view or a mixture: the source of every figure in reports, the viewer and notebooks.

For a dataset, all rows are counted, with the trained tokens of its default view; for a view, the rows it serves, after
truncation; for a mixture, those of its members, each once. A pair counts as one row and two sequences. The cost is a
few passes over the segments, and one packing per capacity compared: about three seconds for a million rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int64
from penstock.load.example import default_policy, place_of
from penstock.load.index import Holdout
from penstock.load.options import LossMask, Overlong, UnknownRegions, ViewOptions
from penstock.load.view import Served, View
from penstock.load.windows import Ledger, Reason, Rows, each_row_once, row_hashes
from penstock.look.packing_fill import Fill, Limit, fills, limits
from penstock.look.survey import Flag, Survey, repeated, served, survey, whole
from penstock.prepare.chat.conversation import Role
from penstock.store.dataset import Dataset

if TYPE_CHECKING:
    from penstock.build.turns_preview import TurnsCompared  # loads the engines


_FEW: Final = 5  # rows named as examples
_OCTAVE: Final = 4  # fine bins from one power of two to the next
_SINGLE: Final = 24  # up to this many messages, every number has its own bin


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of some numbers; quantiles are values that occur."""

    mean: float
    p50: int
    p90: int
    p99: int
    max: int

    @classmethod
    def of(cls, values: npt.NDArray[np.integer]) -> Spread:
        """Compute the distribution; all zeros if there are no values."""
        if not len(values):
            return cls(0.0, 0, 0, 0, 0)
        p50, p90, p99 = np.percentile(values, [50, 90, 99], method="higher")
        return cls(float(values.mean()), int(p50), int(p90), int(p99), int(values.max()))


class Bin(NamedTuple):
    """The number of sequences with at least `low` and fewer than `high` tokens (or messages)."""

    low: int
    high: int
    sequences: int


class SourceCounts(NamedTuple):
    """The counts of one source file."""

    source: int
    name: str
    rows: int
    tokens: int
    trained: int


class MemberCounts(NamedTuple):
    """A member of a mixture: the sequences (or pairs) that it has, and those of an epoch."""

    name: str
    items: int
    per_epoch: int


class Named(NamedTuple):
    """A notable row, by its number in the dataset; in a mixture, counted over the datasets of all members."""

    row: int
    tokens: int
    trained: int


class Copies(NamedTuple):
    """Rows of equal content."""

    row: int  # the first of them
    copies: int


class Flagged(NamedTuple):
    """The number of rows with a problem, and the first of them."""

    rows: int
    first: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of a dataset, a view or a mixture."""

    rows: int
    sequences: int
    tokens: int
    trained: int
    trained_share: float
    lengths: Spread  # tokens per sequence
    messages: Spread  # per sequence with known regions
    histogram: tuple[Bin, ...]
    tokens_by_role: Mapping[str, int]
    rows_without_trained_token: int
    rows_with_unknown_regions: int
    duplicate_rows: int  # rows whose content occurred before
    trained_by_role: Mapping[str, int] = field(default_factory=dict)
    fine_histogram: tuple[Bin, ...] = ()
    full_histogram: tuple[Bin, ...] = ()  # of whole rows, before max_length cuts them
    message_histogram: tuple[Bin, ...] = ()
    sources: tuple[SourceCounts, ...] = ()
    limits: tuple[Limit, ...] = ()  # of whole rows, before max_length cuts them
    packing: tuple[Fill, ...] = ()
    longest: tuple[Named, ...] = ()
    emptiest: tuple[Named, ...] = ()  # the smallest share of trained tokens
    copies: tuple[Copies, ...] = ()
    flags: Mapping[str, Flagged] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    build: Mapping[str, Any] = field(default_factory=dict)  # rows in, kept and rejected, and notes
    cut_rows: int = 0  # rows over the maximum length
    cut_tokens: int = 0  # tokens that truncation removes from them
    untrained: Flagged = Flagged(0, ())  # rows of a view that are not served: the policy trains none of their tokens
    beyond: Flagged = Flagged(0, ())  # rows that are not served: all that is trained is beyond max_length
    desirable: int | None = None  # sequences labelled as good; None: the data has no labels (KTO)
    members: tuple[MemberCounts, ...] = ()  # of a mixture
    turns: TurnsCompared | None = None  # both modes of `--turns` on the first rows; only `penstock stats` looks at it

    def to_json(self) -> dict[str, object]:
        """Plain values for JSON."""
        plain: dict[str, object] = {**asdict(self), "ledger": self.ledger.to_json()}
        for name in ("histogram", "fine_histogram", "full_histogram", "message_histogram"):
            plain[name] = [entry._asdict() for entry in getattr(self, name)]
        for name in ("sources", "limits", "packing", "longest", "emptiest", "copies", "members"):
            plain[name] = [entry._asdict() for entry in getattr(self, name)]
        plain |= {"untrained": self.untrained._asdict(), "beyond": self.beyond._asdict()}
        plain["flags"] = {name: entry._asdict() for name, entry in self.flags.items()}
        return plain

    def _repr_html_(self) -> str:
        from penstock.look.notebook import stats_html

        return stats_html(self)


class _Shard(NamedTuple):
    """The counts of one shard, one entry per sequence, except hashes (per row) and sizes (of all sequences)."""

    source: int
    rows: Int64
    seen: Survey
    hashes: npt.NDArray[np.uint64]
    hashed: Int64  # the rows of the hashes
    unknown: int
    sizes: Int64
    desirable: int | None  # sequences


def stats(target: Dataset | Served, capacity: int | None = None) -> Stats:
    """Statistics of all rows of a dataset, or of those that are served; `capacity` is added to the usual ones."""
    views, shards = _counted(target)
    settings, ledger = views[0].settings, sum((view.ledger for view in views), Ledger())
    left_out = 0 if isinstance(target, Dataset) else ledger.dropped_rows.get(Reason.REGIONS_UNKNOWN, 0)
    seen = [shard.seen for shard in shards]
    lengths, trained = _joined([one.lengths for one in seen]), _joined([one.trained for one in seen])
    messages = _joined([one.messages[one.flags & Flag.REGIONS_UNKNOWN == 0] for one in seen])
    hashes, hashed = np.concatenate([_NO_HASH, *(s.hashes for s in shards)]), _joined([s.hashed for s in shards])
    rows, again = _joined([shard.rows for shard in shards]), repeated(hashes)
    sizes, labels = _joined([shard.sizes for shard in shards]), [s.desirable for s in shards if s.desirable is not None]
    tokens, all_trained = int(lengths.sum()), ledger.trained
    cut = [] if isinstance(target, Dataset) else [_cut(view) for view in views]
    untrained, beyond = _not_trained(views)
    members = {} if isinstance(target, Dataset) or target.single is not None else target.members
    names = list(members) or views[0].dataset.source_names
    return Stats(
        rows=len(hashes),
        sequences=len(lengths),
        tokens=tokens,
        trained=all_trained,
        trained_share=all_trained / tokens if tokens else 0.0,
        lengths=Spread.of(lengths),
        messages=Spread.of(messages),
        histogram=_histogram(lengths),
        tokens_by_role=_by_role([one.tokens_by_role for one in seen]),
        trained_by_role=_by_role([one.trained_by_role for one in seen]),
        rows_without_trained_token=ledger.dropped_rows.get(Reason.NO_TRAINED_TOKEN, 0),
        rows_with_unknown_regions=left_out + sum(shard.unknown for shard in shards),
        duplicate_rows=int(np.count_nonzero(again)),
        cut_rows=sum(rows for rows, _ in cut),
        cut_tokens=sum(tokens for _, tokens in cut),
        fine_histogram=_fine(lengths),
        full_histogram=_fine(sizes),
        message_histogram=_of_messages(messages),
        sources=_sources(names, shards),
        limits=limits(sizes, settings.max_length),
        packing=() if views[0].is_preference else fills(lengths, capacity or settings.max_length),
        longest=_named(rows, lengths, trained, np.argsort(-lengths, kind="stable")[:_FEW]),
        emptiest=_named(rows, lengths, trained, np.argsort(trained / np.maximum(lengths, 1), kind="stable")[:_FEW]),
        copies=_copies(hashes, hashed, again),
        flags=_flags(rows, np.concatenate([_NO_FLAG, *(one.flags for one in seen)])),
        ledger=ledger,
        build=_build([view.dataset for view in views]),
        untrained=untrained,
        beyond=beyond,
        desirable=sum(labels) if labels else None,
        members=tuple(MemberCounts(name, len(one.view), one.per_epoch) for name, one in members.items()),
    )


def _counted(target: Dataset | Served) -> tuple[list[View], list[_Shard]]:
    """The views behind the target, and their shards; in a mixture, rows are counted over all members' datasets."""
    if isinstance(target, Dataset):
        return [View(target, ViewOptions(regions_unknown=UnknownRegions.DROP))], list(_of_dataset(target))
    if target.single is not None:
        return target.views, list(_of_view(target.single))
    views, shards, before = target.views, list[_Shard](), 0
    for member, view in enumerate(views):
        for shard in _of_view(view):
            shards.append(shard._replace(source=member, rows=shard.rows + before, hashed=shard.hashed + before))
        before += len(view.dataset)
    return views, shards


def _not_trained(views: list[View]) -> tuple[Flagged, Flagged]:
    """The rows with no trained token that are not served: those the policy never trains, and those that are cut off."""
    found, before = ([_NONE], [_NONE]), 0
    for view in views:
        if view.ledger.dropped_rows.get(Reason.NO_TRAINED_TOKEN):
            for kind, rows in enumerate(_without_trained_token(view)):
                found[kind].append(rows + before)
        before += len(view.dataset)
    mute, cut = (np.concatenate(rows) for rows in found)
    return Flagged(len(mute), tuple(mute[:_FEW].tolist())), Flagged(len(cut), tuple(cut[:_FEW].tolist()))


def _without_trained_token(view: View) -> tuple[Int64, Int64]:
    dataset, settings = view.dataset, view.settings
    shards = range(len(dataset.shards.examples))
    holdout = Holdout(settings, (each_row_once(dataset.shards.structure(shard)) for shard in shards))
    mute, cut, before = [_NONE], [_NONE], 0
    for shard in shards:
        rows = Rows.of(dataset.shards.read(shard))
        missing = holdout.shows(row_hashes(rows.columns)) & ~rows.unusable(settings.mask)
        own = np.searchsorted(view.index.rows, (before, before + len(missing)))
        missing[view.index.rows[own[0] : own[1]] - before] = False
        if settings.overlong is Overlong.DROP and settings.max_length is not None:
            missing &= rows.longest <= settings.max_length
        trained = survey(rows, whole(rows), settings.mask).trained.reshape(len(missing), -1).min(axis=1)
        mute.append(np.flatnonzero(missing & (trained == 0)) + before)
        cut.append(np.flatnonzero(missing & (trained > 0)) + before)
        before += len(missing)
    return np.concatenate(mute), np.concatenate(cut)


_NONE: Final = np.empty(0, np.int64)
_NO_HASH: Final = np.empty(0, np.uint64)
_NO_FLAG: Final = np.empty(0, np.uint8)


def _joined(arrays: list[Int64]) -> Int64:
    return np.concatenate([_NONE, *arrays])


def _of_dataset(dataset: Dataset) -> Iterator[_Shard]:
    sides, before, mask = 2 if dataset.is_preference else 1, 0, LossMask(default_policy(dataset))
    for shard in range(len(dataset.shards.examples)):
        rows = Rows.of(dataset.shards.read(shard))
        numbers = np.arange(len(rows.unknown)) + before
        seen = survey(rows, whole(rows), mask, bos=dataset.token_id("bos_token"))
        yield _shard(dataset, rows, numbers, np.repeat(numbers, sides), seen, before)
        before += len(numbers)


def _of_view(view: View) -> Iterator[_Shard]:
    before, mask, overlong = 0, view.settings.mask, view.settings.overlong
    bos = view.dataset.token_id("bos_token")
    for shard, numbers, extents in served(view):
        rows = Rows.of(view.dataset.shards.read(shard))
        seen = survey(rows, extents, mask, overlong, bos)
        own = np.unique(numbers)  # a split row is one row
        yield _shard(view.dataset, rows, own, numbers, seen, before)
        before += len(rows.unknown)


def _shard(dataset: Dataset, rows: Rows, own: Int64, numbers: Int64, seen: Survey, before: int) -> _Shard:
    source = place_of(dataset, before).source if len(rows.unknown) else 0
    local = own - before
    unknown = int(rows.unknown[local].sum())
    if rows.columns.prefixes is not None:  # examples of the same row are not duplicates
        first = np.diff(rows.columns.rows[local].astype(np.int64), prepend=-1) != 0
        own, local = own[first], local[first]
    hashes, labels = row_hashes(rows.columns)[local], rows.columns.desirable
    good = None if labels is None else int(labels[numbers - before].sum())
    return _Shard(source, numbers, seen, hashes, own, unknown, rows.sizes.ravel(), good)


def _by_role(counts: list[dict[Role, int]]) -> dict[str, int]:
    total = Counter[Role]()
    for count in counts:
        total.update(count)
    return {role.name.lower(): total[role] for role in Role if total[role]}


def _sources(names: list[str], shards: list[_Shard]) -> tuple[SourceCounts, ...]:
    total: dict[int, list[int]] = {}
    for shard in shards:
        own = total.setdefault(shard.source, [0, 0, 0])
        added = len(shard.hashes), int(shard.seen.lengths.sum()), int(shard.seen.trained.sum())
        total[shard.source] = [have + more for have, more in zip(own, added, strict=True)]
    known = dict(enumerate(names))
    return tuple(
        SourceCounts(source, known.get(source, f"source {source}"), *counts) for source, counts in sorted(total.items())
    )


def _named(rows: Int64, lengths: Int64, trained: Int64, chosen: Int64) -> tuple[Named, ...]:
    return tuple(Named(int(rows[at]), int(lengths[at]), int(trained[at])) for at in chosen)


def _copies(hashes: npt.NDArray[np.uint64], rows: Int64, again: npt.NDArray[np.bool_]) -> tuple[Copies, ...]:
    """The most frequent duplicates."""
    values, counts = np.unique(hashes[again], return_counts=True)
    most = np.argsort(-counts, kind="stable")[:_FEW]
    return tuple(Copies(int(rows[np.argmax(hashes == values[at])]), int(counts[at]) + 1) for at in most)


def _flags(rows: Int64, flags: npt.NDArray[np.uint8]) -> dict[str, Flagged]:
    found = {}
    for flag in Flag:
        own = np.unique(rows[flags & flag != 0])
        if len(own):
            assert flag.name is not None
            found[flag.name.lower()] = Flagged(len(own), tuple(own[:_FEW].tolist()))
    return found


def _build(datasets: list[Dataset]) -> dict[str, Any]:
    """The build ledgers, added up."""
    total: dict[str, Any] = {}
    for dataset in datasets:
        for name in ("rows", "kept", "examples", "tokens", "rejected", "notes"):
            value = getattr(dataset.ledger, name)
            plain = isinstance(value, int)
            total[name] = total.get(name, 0) + value if plain else Counter(total.get(name, {})) + Counter(value)
    return {name: dict(value) if isinstance(value, Counter) else value for name, value in total.items()}


def _histogram(lengths: Int64) -> tuple[Bin, ...]:
    """Bins between powers of two, from the first to the last non-empty one."""
    if not len(lengths):
        return ()
    bits = np.frexp(lengths.astype(np.float64))[1]  # 0 for no tokens, 1 for one, 2 for two and three, …
    counts = np.bincount(bits)
    first = int(bits.min())
    return tuple(Bin(2**bit // 2, 2**bit, int(counts[bit])) for bit in range(first, len(counts)))


def _fine(lengths: Int64) -> tuple[Bin, ...]:
    """Four bins per power of two (fewer for small numbers), from the first to the last non-empty one."""
    if not len(lengths):
        return ()
    octaves = int(lengths.max()).bit_length() + 1
    edges = np.unique(np.floor(2 ** (np.arange(octaves * _OCTAVE + 1) / _OCTAVE)).astype(np.int64))
    edges = np.concatenate(([0], edges))
    counts = np.histogram(lengths, edges)[0]
    some = np.flatnonzero(counts)
    return tuple(Bin(int(edges[at]), int(edges[at + 1]), int(counts[at])) for at in range(some[0], some[-1] + 1))


def _of_messages(messages: Int64) -> tuple[Bin, ...]:
    """One bin per number if there are few, else bins between powers of two."""
    if not len(messages) or int(messages.max()) > _SINGLE:
        return _histogram(messages)
    return tuple(Bin(number, number + 1, int(count)) for number, count in enumerate(np.bincount(messages)))


def _cut(target: View) -> tuple[int, int]:
    """The number of rows over a view's maximum length, and the tokens they lose."""
    if target.settings.max_length is None:
        return 0, 0
    most, how = target.settings.max_length, target.settings.overlong
    if how is Overlong.SPLIT:
        return 0, 0
    rows = tokens = 0
    for shard in range(len(target.dataset.shards.examples)):
        sizes = Rows.of(target.dataset.shards.structure(shard)).sizes.reshape(-1, 2 if target.is_preference else 1)
        over = sizes[sizes.max(axis=1, initial=0) > most]
        rows += len(over)
        tokens += int((over if how is Overlong.DROP else np.maximum(over - most, 0)).sum())
    return rows, tokens
