"""Options of `penstock adopt`: flags and documentation are derived from here. Importable without numpy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from penstock.build.options import nearest
from penstock.chat.formats import option
from penstock.errors import UsageError


class Check(StrEnum):
    """What to do if most of the sample re-encodes to different ids."""

    ERROR = "error"
    WARN = "warn"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptOptions:
    """Options of `adopt` other than the sources."""

    tokenizer: str = option("Tokenizer the rows were made with: a folder, a tokenizer.json, or a hub name", "")
    tokenizer_revision: str | None = option("Revision of a tokenizer from the hub")
    mask: str | None = option("Column with the loss mask, if there are several")
    dtype: str | None = option("Type of the ids in OLMo-core's numpy parts; default: the smallest for the vocabulary")
    check_tokenizer: Check = option("If most of a sample re-encodes differently: error, warn", Check.ERROR)
    cache: Path | None = option("Cache folder; default: PENSTOCK_CACHE or ~/.cache/penstock")


def adopt_options(values: Mapping[str, Any]) -> AdoptOptions:
    """Validates options; unknown names and invalid values are errors that state the remedy."""
    from pydantic import TypeAdapter, ValidationError

    known = [f.name for f in fields(AdoptOptions)]
    for name in values:
        if name not in known:
            raise UsageError(f"unknown option {name!r}.{nearest(name, known)}")
    plain = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in values.items()}
    try:
        options: AdoptOptions = TypeAdapter(AdoptOptions).validate_python(plain)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{first['loc'][0]}: {first['msg']} (got {first['input']!r})") from error
    if not options.tokenizer:
        raise UsageError("no tokenizer: pass the one that the rows were made with, with --tokenizer")
    return options
