"""The settings that determine which rows a step holds; ranks and prefetching have no influence."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum

import orjson
from blake3 import blake3


class Tail(StrEnum):
    """What to do if an epoch's rows don't fill its last step."""

    FILL = "fill"  # fill up with rows without loss
    DROP = "drop"  # skip the step
    WRAP = "wrap"  # fill up with the epoch's first rows


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Settings of a plan. A row is a sequence, a pair or, with a capacity, a bin of packed sequences."""

    batch_size: int  # rows in a global step
    capacity: int | None = None
    align: int = 1  # sequences in a bin are padded to a multiple of it
    seed: int = 0
    shuffle: bool = True
    tail: Tail = Tail.FILL

    @property
    def digest(self) -> str:
        """A stable digest of these settings."""
        canonical = orjson.dumps({"plan": 1, **asdict(self), "seed": str(self.seed)}, option=orjson.OPT_SORT_KEYS)
        return f"b3-{blake3(canonical).hexdigest()}"
