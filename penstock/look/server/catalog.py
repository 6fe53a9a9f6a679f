"""The catalog behind the viewer's filters: 10 bytes per row, read in the background within a second or two.

Until it is ready, rows are listed directly from their shards; a page that filters or sorts waits for it.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from penstock.arrays import Bool, Int64, UInt8
from penstock.chat.conversation import Role
from penstock.errors import PenstockError
from penstock.look.stats import start_token
from penstock.look.survey import Extents, Flag, columns_of, repeated, survey, whole
from penstock.store.dataset import StoredDataset
from penstock.view.index.shard import Rows, row_hashes
from penstock.view.settings import Overlong, ViewSettings


class Filters(NamedTuple):
    """Which rows to list, and in which order; None and empty values match any row."""

    role: str = ""
    shortest: int | None = None
    longest: int | None = None
    least: int | None = None  # trained share in percent
    most: int | None = None
    warning: str = ""
    source: int | None = None
    sort: str = ""

    @property
    def any(self) -> bool:
        """Whether any filter is set."""
        return self != Filters()


SORTS = {"": "row number", "longest": "longest first", "shortest": "shortest first", "least": "least trained first"}


class Catalog:
    """Lengths, trained tokens, roles and flags of all rows under one loss policy."""

    def __init__(self, dataset: StoredDataset, settings: ViewSettings) -> None:
        self._dataset, self._settings = dataset, settings
        self._sides = 2 if dataset.is_preference else 1
        self._ready = threading.Event()
        self._error: PenstockError | None = None
        self.done = 0
        self.shards = len(dataset.shards)
        self.bounds = np.concatenate(([0], np.cumsum(dataset.shard_examples // self._sides)))
        rows = int(self.bounds[-1])
        self._lengths, self._trained = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        self._roles, self._flags = np.zeros(rows, np.uint8), np.zeros(rows, np.uint8)
        self._starting = threading.Lock()
        self._started = False

    def start(self) -> None:
        """Start reading in the background; called after the first page is sent."""
        with self._starting:
            if not self._started:
                self._started = True
                threading.Thread(target=self._fill, name="catalog", daemon=True).start()

    def rows(self, filters: Filters) -> Int64 | None:
        """The rows that pass, in order; None: all of them, in their own order."""
        if not filters.any:
            return None
        self._wait()
        chosen = np.flatnonzero(self._passing(filters))
        match filters.sort:
            case "longest":
                return chosen[np.argsort(-self._lengths[chosen], kind="stable")]
            case "shortest":
                return chosen[np.argsort(self._lengths[chosen], kind="stable")]
            case "least":
                return chosen[np.argsort(self._shares[chosen], kind="stable")]
        return chosen

    def flags(self) -> dict[str, int]:
        """The number of rows per warning."""
        self._wait()
        counts = {str(flag.name).lower(): int(np.count_nonzero(self._flags & flag)) for flag in Flag}
        return {name: count for name, count in counts.items() if count}

    @property
    def ready(self) -> bool:
        """Whether all rows have been read."""
        return self._ready.is_set()

    @property
    def _shares(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return self._trained / np.maximum(self._lengths, 1)

    def _passing(self, filters: Filters) -> Bool:
        keep = np.ones(len(self._lengths), np.bool_)
        if filters.role:
            keep &= self._roles & (1 << Role[filters.role.upper()].value) != 0
        if filters.shortest is not None:
            keep &= self._lengths >= filters.shortest
        if filters.longest is not None:
            keep &= self._lengths <= filters.longest
        if filters.least is not None:
            keep &= self._shares * 100 >= filters.least
        if filters.most is not None:
            keep &= self._shares * 100 <= filters.most
        if filters.warning:
            keep &= self._flags & Flag[filters.warning.upper()] != 0
        if filters.source is not None:
            sources = np.asarray(self._dataset.manifest.shards.sources)
            keep &= np.repeat(sources == filters.source, np.diff(self.bounds))
        return keep

    def _wait(self) -> None:
        self.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error

    def _fill(self) -> None:
        try:
            hashes = [self._shard(shard) for shard in range(self.shards)]
            if hashes:
                self._flags |= np.where(repeated(np.concatenate(hashes)), Flag.DUPLICATE, 0).astype(np.uint8)
        except PenstockError as error:
            self._error = error
        finally:
            self._ready.set()

    def _shard(self, shard: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        rows = Rows.of(columns_of(self._dataset, shard))
        own, limit = slice(int(self.bounds[shard]), int(self.bounds[shard + 1])), self._settings.max_length
        extents = whole(rows)
        if limit is not None and self._settings.overlong is Overlong.TRUNCATE:
            extents = Extents(*extents[:2], np.minimum(extents.ends, limit), extents.trained_from)
        seen = survey(rows, extents, self._settings.train_on, self._settings.overlong, start_token(self._dataset))
        sizes = rows.sizes.reshape(-1, self._sides)
        self._lengths[own] = sizes.sum(axis=1)
        self._trained[own] = seen.trained.reshape(-1, self._sides).sum(axis=1)
        self._roles[own] = _either(seen.roles, self._sides)
        overlong = (sizes.max(axis=1) > limit) if limit is not None else np.zeros(len(sizes), np.bool_)
        self._flags[own] = _either(seen.flags, self._sides) | np.where(overlong, Flag.OVERLONG, 0).astype(np.uint8)
        self.done = shard + 1
        return row_hashes(rows.columns).copy()


def _either(values: UInt8, sides: int) -> UInt8:
    """The bits of a row: those of its sequence, or of both sides of a pair combined."""
    joined: UInt8 = np.bitwise_or.reduce(values.reshape(-1, sides), axis=1)
    return joined
