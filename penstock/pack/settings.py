"""What decides which rows a step holds; nothing else does, ranks and look-ahead least of all."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum

import orjson
from blake3 import blake3


class Tail(StrEnum):
    """What happens where an epoch's rows do not fill its last step."""

    FILL = "fill"  # the step is short; rows without loss fill it up
    DROP = "drop"  # the step is left out
    WRAP = "wrap"  # it is filled with the epoch's first rows


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """A row is a sequence, a pair, or, with a capacity, a bin of packed sequences."""

    batch_size: int  # rows of a global step
    capacity: int | None = None
    align: int = 1  # sequences in a bin are padded to a multiple of it
    seed: int = 0
    shuffle: bool = True
    tail: Tail = Tail.FILL

    @property
    def digest(self) -> str:
        """A stable name for these settings."""
        canonical = orjson.dumps({"plan": 1, **asdict(self), "seed": str(self.seed)}, option=orjson.OPT_SORT_KEYS)
        return f"b3-{blake3(canonical).hexdigest()}"
