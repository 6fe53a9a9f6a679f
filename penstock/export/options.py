"""Every option of `penstock export`, declared once: flags and documentation come from here. Light: no numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from penstock.chat.formats import option
from penstock.view.options import ViewFlags, checked_options


class Weights(StrEnum):
    """What happens to loss weights other than 0 and 1 in a format that only has a mask."""

    ERROR = "error"
    MASK = "mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions(ViewFlags):
    """Options of `export`, besides the datasets, the format and the folder."""

    seed: int = option("Seed of a mixture", 0)
    epoch: int = option("Epoch of a mixture with fractions of its parts", 0)
    capacity: int | None = option("Pack rows of that many tokens, where the format takes packed rows")
    part_tokens: int | None = option("Tokens of a part: the unit of files, of resuming and of parallel work")
    weights: Weights = option(
        "Loss weights other than 0 and 1 where a format only has a mask: error, mask", Weights.ERROR
    )
    workers: int | None = option("Threads that write; default: as many as cores, at most 8")


def export_options(values: Mapping[str, Any]) -> ExportOptions:
    """Options from names and values; unknown names and wrong values are errors that say what would be right."""
    return checked_options(ExportOptions, values)
