"""Options of `penstock export`: flags and documentation are derived from here. Importable without numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from penstock.build.options import nearest
from penstock.chat.formats import option
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.view.settings import ViewOptions


class Weights(StrEnum):
    """What to do with loss weights other than 0 and 1 in a format that only has a mask."""

    ERROR = "error"
    MASK = "mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of `export` other than the datasets, the format and the folder."""

    train_on: str = option("Loss policy: which tokens are trained", "all_assistant_messages")
    max_length: int | None = option("Longest sequence")
    overlong: str = option("Longer rows: truncate, truncate_left, drop, split, error", "truncate")
    regions_unknown: str = option("Rows whose regions are unknown: error, drop", "error")
    holdout: float | int | None = option("Rows to hold out: a fraction or a number")
    part: str = option("Side of the hold-out: train, held_out", "train")
    holdout_seed: int = option("Seed of the hold-out", 0)
    seed: int = option("Seed of a mixture", 0)
    epoch: int = option("Epoch to export, of a mixture with fractions", 0)
    capacity: int | None = option("Pack sequences into rows of this many tokens, if the format supports it")
    part_tokens: int | None = option("Tokens per part, the unit of files, resuming and parallel work")
    weights: Weights = option(
        "Loss weights other than 0 and 1 in a format that only has a mask: error, mask", Weights.ERROR
    )
    workers: int | None = option("Writer threads; default: one per core, at most 8")

    @property
    def view(self) -> ViewOptions:
        """The options of the view."""
        return {
            "train_on": self.train_on,
            "max_length": self.max_length,
            "overlong": self.overlong,
            "regions_unknown": self.regions_unknown,
            "holdout": self.holdout,
            "part": self.part,
            "holdout_seed": self.holdout_seed,
        }


def export_options(values: Mapping[str, Any]) -> ExportOptions:
    """Validates options; unknown names and invalid values are errors that state the remedy."""
    from pydantic import TypeAdapter, ValidationError

    known = [f.name for f in fields(ExportOptions)]
    for name in values:
        if name not in known:
            raise UsageError(f"unknown option {name!r}.{nearest(name, known)}")
    try:
        options: ExportOptions = TypeAdapter(ExportOptions).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{first['loc'][0]}: {first['msg']} (got {first['input']!r})") from error
    return options
