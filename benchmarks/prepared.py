"""Rows as a peer of `benchmarks.peers` prepared them, with its time, in a file.

Peers run in several environments, so this needs only numpy.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Stopwatch:
    """Measures a block: wall time, and CPU time of this process and of children that ended meanwhile."""

    def __enter__(self) -> Stopwatch:
        self._began = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds, self.cpu = (end - begin for begin, end in zip(self._began, self._now(), strict=True))

    @staticmethod
    def _now() -> tuple[float, float]:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return time.perf_counter(), sum(one.ru_utime + one.ru_stime for one in used)


class PreparedRows(NamedTuple):
    """Tokens and masks, a row each, and the time they took."""

    seconds: float
    cpu: float
    ids: Sequence[Any]
    masks: Sequence[Any]

    @classmethod
    def of(cls, watch: Stopwatch, ids: Sequence[Any], masks: Sequence[Any]) -> PreparedRows:
        return cls(watch.seconds, watch.cpu, ids, masks)

    def write(self, file: Path) -> None:
        columns = {
            name: np.concatenate([np.asarray(row, kind) for row in column])
            for name, column, kind in (("ids", self.ids, np.uint32), ("masks", self.masks, np.bool_))
        }
        ends = np.cumsum([len(row) for row in self.ids])
        with file.open("wb") as opened:
            np.savez(opened, time=(self.seconds, self.cpu), ends=ends, **columns)

    @classmethod
    def read(cls, file: Path) -> PreparedRows:
        with np.load(file) as found:
            seconds, cpu = found["time"].tolist()
            ids, masks = (np.split(found[name], found["ends"][:-1]) for name in ("ids", "masks"))
        return cls(seconds, cpu, ids, masks)
