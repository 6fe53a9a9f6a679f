"""The view ledger: accounts for every row and token of a dataset under a view. Its sums add up exactly.

    rows   = kept + dropped (by reason)               in the view's part; `other_part` counts the rest of the dataset
    tokens = trained + masked + truncated + dropped   in the same rows

A row is one example, or one pair with the tokens of both sides. With `split`, a kept row may serve several examples,
and its chunks without a trained token count as dropped tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum


class Reason(StrEnum):
    """Why a row or chunk is dropped."""

    REGIONS_UNKNOWN = "regions_unknown"
    OVERLONG = "overlong"
    NO_TRAINED_TOKEN = "no_trained_token"
    CHUNK_WITHOUT_TRAINED_TOKEN = "chunk_without_trained_token"  # the row serves other chunks


@dataclass(frozen=True, slots=True)
class Ledger:
    """Counts of rows and tokens. Ledgers of disjoint rows can be added."""

    rows: int = 0
    kept: int = 0
    examples: int = 0  # served; differs from `kept` under split
    other_part: int = 0
    tokens: int = 0
    trained: int = 0
    masked: int = 0
    truncated: int = 0
    dropped_rows: Mapping[str, int] = field(default_factory=dict)
    dropped_tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def dropped(self) -> int:
        """Tokens dropped for any reason."""
        return sum(self.dropped_tokens.values())

    @property
    def adds_up(self) -> bool:
        """Whether both sums hold; false indicates a bug in Penstock."""
        rows = self.kept + sum(self.dropped_rows.values())
        return self.rows == rows and self.tokens == self.trained + self.masked + self.truncated + self.dropped

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(
            rows=self.rows + other.rows,
            kept=self.kept + other.kept,
            examples=self.examples + other.examples,
            other_part=self.other_part + other.other_part,
            tokens=self.tokens + other.tokens,
            trained=self.trained + other.trained,
            masked=self.masked + other.masked,
            truncated=self.truncated + other.truncated,
            dropped_rows=_sum(self.dropped_rows, other.dropped_rows),
            dropped_tokens=_sum(self.dropped_tokens, other.dropped_tokens),
        )

    def to_json(self) -> dict[str, object]:
        """Plain values, with the total of dropped tokens."""
        return {**asdict(self), "dropped": self.dropped}


def _sum(left: Mapping[str, int], right: Mapping[str, int]) -> dict[str, int]:
    return {name: left.get(name, 0) + right.get(name, 0) for name in sorted({*left, *right})}
