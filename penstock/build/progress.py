"""What a build tells while it runs and when it is done."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class SliceReport:
    """What the parent learns of a finished slice."""

    name: str
    rows: int
    examples: int
    tokens: int
    bytes: int  # of rows read
    rejected: int
    losses: list[str]  # notes of what the model neither sees nor learns
    engines: Mapping[str, Mapping[str, int]]  # stage -> why the reference served -> rows
    encoder: tuple[str, str]  # the engine that encodes, and why it is not a faster one
    checked: int  # rows that were redone with the references and compared
    mismatches: int  # of these, rows that differed; the slice was redone by the references
    paths: tuple[int, int]  # ways through the template's branches: taken, and compared
    memory: int  # resident bytes of the process

    def as_json(self) -> dict[str, Any]:
        """For the way from a worker to its parent."""
        return asdict(self)


@dataclass(slots=True)
class Progress:
    """Counts so far. `bytes_total` is 0 while it is not known."""

    workers: int = 1
    bytes_total: int = 0
    slices_done: int = 0
    slices_reused: int = 0
    slices_elsewhere: int = 0  # made by other processes while this one worked
    rows: int = 0
    examples: int = 0
    tokens: int = 0
    bytes: int = 0  # of rows read by this process
    bytes_seen: int = 0  # of slices found, reused ones included
    rejected: int = 0
    checked: int = 0
    mismatches: int = 0
    paths: tuple[int, int] = (0, 0)  # of the process that has taken most
    others_checked: int = 0  # shards that other users wrote and whose rows were compared with the references
    others_rows: int = 0  # rows of them that were
    others_refused: int = 0  # of these shards, those that differed; they were made again
    retries: int = 0
    memory: int = 0  # of the largest worker
    waiting: bool = False
    started: float = field(default_factory=time.monotonic)
    engines: dict[str, Counter[str]] = field(default_factory=dict)
    encoder: tuple[str, str] = ("", "")  # the engine that encodes, and why it is not a faster one

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.started

    @property
    def bytes_per_second(self) -> float:
        """Of rows read."""
        return self.bytes / max(self.seconds, 1e-9)

    @property
    def eta(self) -> float | None:
        """Seconds left, where that can be told."""
        left = self.bytes_total - self.bytes_seen
        return left / self.bytes_per_second if self.bytes and left >= 0 and self.bytes_total else None

    def add(self, report: SliceReport) -> None:
        """Count a finished slice."""
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
