"""What an engine is: the part of a build that runs slices somewhere.

`pool` has the engines of one machine, `ray_engine` the one of a cluster. An engine decides only who prepares a slice;
`sharing` decides which slices a build takes, and a shard has the same bytes no matter which worker writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.build.progress import SliceReport
from penstock.build.recipe import Recipe
from penstock.build.workers.process import Task
from penstock.store.cache import Cache

OnReport = Callable[[Task, SliceReport], None]
OnRetry = Callable[[Sequence[Task], str], None]  # the slices of a worker, and how it died


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings that all workers of a build share."""

    recipe: Recipe
    cache: Cache
    tokenizer_json: bytes
    fast: bool

    def to_json(self) -> dict[str, Any]:
        """Returns the settings as they are sent to a worker, which finds the tokenizer in the cache."""
        return {"recipe": self.recipe.as_json(), "cache": list(self.cache.place), "fast": self.fast}


class SliceEngine(Protocol):
    """Runs slices. Workers start with the first task and stay until the engine is closed."""

    @property
    def workers(self) -> int:
        """Number of workers."""

    @property
    def nodes(self) -> int:
        """Number of machines they are on; 0 if the engine uses this one only."""

    def run(self, tasks: Iterator[Task], on_report: OnReport, on_retry: OnRetry) -> None:
        """Runs all tasks, drawing each when a worker is ready for it. The callbacks are never run concurrently."""

    def close(self) -> None:
        """Stops all workers."""
