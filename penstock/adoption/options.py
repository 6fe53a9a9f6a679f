"""Options of `penstock adopt`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from penstock.errors import UsageError
from penstock.options import option, read_options


class Check(StrEnum):
    """What to do if most of the sample re-encodes to different ids."""

    ERROR = "error"
    WARN = "warn"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptOptions:
    """Options of `adopt` other than the sources."""

    tokenizer: str = option(
        "Tokenizer the rows were made with: a folder, a tokenizer.json, or a hub name", "", also="os.PathLike[str]"
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
