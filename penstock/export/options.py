"""The options of `penstock export`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated

from annotated_types import Ge

from penstock.options import option
from penstock.view.settings import ViewSettings


class Weights(StrEnum):
    """What happens to loss weights other than 0 and 1 in a format that only has a mask."""

    ERROR = "error"
    MASK = "mask"


@dataclass(frozen=True, kw_only=True)  # without slots: ExportOptions has two bases
class WriteOptions:
    """How a view or a mixture is written."""

    epoch: Annotated[int, Ge(0)] = option("Epoch of a mixture with fractions of its parts", 0)
    capacity: Annotated[int, Ge(1)] | None = option("Pack rows of that many tokens, where the format takes packed rows")
    part_tokens: Annotated[int, Ge(1)] | None = option(
        "Tokens of a part: the unit of files, of resuming and of parallel work"
    )
    weights: Weights = option(
        "Loss weights other than 0 and 1 where a format only has a mask: error, mask", Weights.ERROR
    )
    workers: Annotated[int, Ge(1)] | None = option("Threads that write; default: one per core, up to 8")


@dataclass(frozen=True, kw_only=True)
class ExportOptions(WriteOptions, ViewSettings):
    """Options of the command, besides the datasets, the format and the folder."""

    seed: Annotated[int, Ge(0)] = option("Seed of a mixture", 0)

    @property
    def view(self) -> ViewSettings:
        """Those that a view takes."""
        return ViewSettings(**{entry.name: getattr(self, entry.name) for entry in fields(ViewSettings)})
