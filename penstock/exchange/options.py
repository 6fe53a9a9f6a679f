"""Options of `penstock adopt`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Any

from annotated_types import Ge

from penstock.errors import UsageError
from penstock.load.options import ViewOptions
from penstock.options import option, read_options


class Check(StrEnum):
    """What to do if most of the sample re-encodes to different ids."""

    ERROR = "error"
    WARN = "warn"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptOptions:
    """Options of `adopt` other than the sources."""

    tokenizer: str = option(
        "Tokenizer the rows were made with: a folder, a tokenizer.json, or a hub name",
        "",
        also="os.PathLike[str]",
        required=True,
    )
    tokenizer_revision: str | None = option("Revision of a tokenizer from the hub")
    mask: str | None = option("Column with the loss mask, if there are several")
    dtype: str | None = option("Type of the ids in OLMo-core's numpy parts; default: the smallest for the vocabulary")
    check_tokenizer: Check = option("If most of a sample re-encodes differently: error, warn", Check.ERROR)
    cache: str | None = option(
        "Cache: a folder, or s3://BUCKET/PREFIX; default: PENSTOCK_CACHE or ~/.cache/penstock", also="os.PathLike[str]"
    )


def adopt_options(values: Mapping[str, Any]) -> AdoptOptions:
    """Validates options; unknown names and invalid values are errors that name what is accepted."""
    options = read_options(AdoptOptions, values, "adopt")
    if not options.tokenizer:
        raise UsageError("no tokenizer: pass the one that the rows were made with, with --tokenizer")
    return options


# ---- options ---------------------------------------------------------------------------------------------------------
#
# Options of `penstock export`.


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
class ExportOptions(WriteOptions, ViewOptions):
    """Options of the command other than the datasets, the format and the folder."""

    seed: Annotated[int, Ge(0)] = option("Seed of a mixture", 0)

    @property
    def view(self) -> ViewOptions:
        """The options of the view."""
        return ViewOptions(**{entry.name: getattr(self, entry.name) for entry in fields(ViewOptions)})
