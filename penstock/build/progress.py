"""Progress of a build: the report of a finished slice, and the totals so far. `look/progress.py` shows them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.prepare.chat.notes import LOSSES

if TYPE_CHECKING:
    from penstock.prepare.slice_record import SliceRecord  # a hit of the cache loads no numpy


@dataclass(frozen=True, slots=True)
class SliceReport:
    """Counts of one committed slice, sent from a worker to its parent."""

    name: str
    rows: int
    examples: int
    tokens: int
    bytes: int  # of rows read
    rejected: int
    losses: list[str]  # notes about parts of rows that the model neither sees nor learns
    engines: Mapping[str, Mapping[str, int]]  # stage -> why the reference engine was used -> rows
    encoder: tuple[str, str]  # the encoding engine, and why no faster one is used
    checked: int  # rows that were compared with the references
    mismatches: int  # compared rows that differed; the slice was redone with the references
    paths: tuple[int, int]  # paths through the template's branches: taken, and compared
    memory: int  # resident bytes of the process

    @classmethod
    def of(cls, name: str, record: SliceRecord, memory: int) -> SliceReport:
        """Returns the report of a prepared slice."""
        return cls(
            name=name,
            rows=record.rows,
            examples=record.ledger["examples"],
            tokens=record.ledger["tokens"],
            bytes=record.bytes,
            rejected=len(record.rejected),
            losses=[note for note in record.ledger["notes"] if note in LOSSES],
            engines={stage: dict(why) for stage, why in record.engines.items() if why},
            encoder=record.encoder,
            checked=record.checked,
            mismatches=record.mismatches,
            paths=(record.paths, 0 if record.mismatches else record.paths),  # new ones are compared, unless redone
            memory=memory,
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the report as a worker sends it to its parent."""
        return asdict(self)

    def shard_record(self) -> dict[str, Any]:
        """Returns what is stored beside the shard."""
        kept = ("rejected", "losses", "engines", "checked", "mismatches", "paths")
        return {name: getattr(self, name) for name in kept} | {"encoder": self.encoder[0]}


@dataclass(slots=True)
class Progress:
    """Totals so far. `bytes_total` is 0 while it is unknown."""

    workers: int = 1  # 0 until a cluster has started them
    nodes: int = 0  # of a cluster; 0 without one
    bytes_total: int = 0
    slices_done: int = 0
    slices_reused: int = 0
    slices_elsewhere: int = 0  # committed by other processes during this build
    rows: int = 0
    examples: int = 0
    tokens: int = 0
    bytes: int = 0  # of rows read by this process
    bytes_seen: int = 0  # of slices found, reused ones included
    rejected: int = 0
    checked: int = 0
    mismatches: int = 0
    paths: tuple[int, int] = (0, 0)  # of the process that has taken the most
    others_checked: int = 0  # shards of other users that were compared with the references
    others_rows: int = 0  # rows compared in these shards
    others_refused: int = 0  # shards among them that differed and were rebuilt
    retries: int = 0  # workers that died on their slices
    slices_retried: int = 0  # slices they were working on
    memory: int = 0  # of the largest worker
    waiting: bool = False
    started: float = field(default_factory=time.monotonic)
    engines: dict[str, Counter[str]] = field(default_factory=dict)
    encoder: tuple[str, str] = ("", "")  # the encoding engine, and why no faster one is used

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def bytes_per_second(self) -> float:
        """Bytes of rows read per second."""
        return self.bytes / max(self.seconds, 1e-9)

    @property
    def eta(self) -> float | None:
        """Estimated seconds left, or None while unknown."""
        left = self.bytes_total - self.bytes_seen
        return left / self.bytes_per_second if self.bytes and left >= 0 and self.bytes_total else None

    def add(self, report: SliceReport) -> None:
        """Adds the counts of a finished slice."""
        self.slices_done += 1
        self.rows += report.rows
        self.examples += report.examples
        self.tokens += report.tokens
        self.bytes += report.bytes
        self.bytes_seen += report.bytes
        self.rejected += report.rejected
        self.checked += report.checked
        self.mismatches += report.mismatches
        self.paths = max(self.paths, (report.paths[0], report.paths[1]))
        self.memory = max(self.memory, report.memory)
        self.encoder = report.encoder[0], report.encoder[1]
        for stage, why in report.engines.items():
            self.engines.setdefault(stage, Counter()).update(why)


OnProgress = Callable[[Progress], None]
