"""Options of `penstock export`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated

from annotated_types import Ge

from penstock.options import option
from penstock.view.settings import ViewSettings


class Weights(StrEnum):
    """What to do with loss weights other than 0 and 1 in a format that only has a mask."""

    ERROR = "error"
    MASK = "mask"


@dataclass(frozen=True, kw_only=True)  # without slots: ExportOptions has two bases
class WriteOptions:
    """How a view or mixture is written."""

    epoch: Annotated[int, Ge(0)] = option("Epoch to export, of a mixture with fractions", 0)
    capacity: Annotated[int, Ge(1)] | None = option(
        "Pack sequences into rows of this many tokens, if the format supports it"
    )
    shuffle_seed: Annotated[int, Ge(0)] | None = option(
        "Shuffle the rows with this seed, for trainers that read them in order; default: dataset order"
    )
    separator: str | None = option(
        "Token to append, untrained, to each document of --to olmo, for revisions that find documents by this token"
    )
    part_tokens: Annotated[int, Ge(1)] | None = option("Tokens per part, the unit of files, resuming and parallel work")
    weights: Weights = option(
        "Loss weights other than 0 and 1 in a format that only has a mask: error, mask", Weights.ERROR
    )
    workers: Annotated[int, Ge(1)] | None = option("Writer threads; default: one per core, at most 8")


@dataclass(frozen=True, kw_only=True)
class ExportOptions(WriteOptions, ViewSettings):
    """Options of the command other than the datasets, the format and the folder."""

    seed: Annotated[int, Ge(0)] = option("Seed of a mixture", 0)

    @property
    def view(self) -> ViewSettings:
        """The options of the view."""
        return ViewSettings(**{entry.name: getattr(self, entry.name) for entry in fields(ViewSettings)})
