"""Every option of `prepare`, declared once: keyword arguments, command-line flags and documentation come from here."""

from __future__ import annotations

import datetime
import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from penstock.addresses import local_path
from penstock.chat.formats import FormatOptions, option
from penstock.errors import UsageError
from penstock.regions.modes import RegionsMode, StopMode
from penstock.store.trust import Trust


class SpecialText(StrEnum):
    """What to do with special tokens that stand in the text of messages."""

    AS_TEMPLATE = "as-template"
    REJECT = "reject"


class Eos(StrEnum):
    """Whether an end-of-sequence token follows plain text and completions that are strings."""

    AUTO = "auto"  # unless the text ends with it or the tokenizer adds it
    ALWAYS = "always"
    NEVER = "never"


class DroppedCalls(StrEnum):
    """What to do with a conversation whose tool calls the template leaves out."""

    REJECT = "reject"
    KEEP = "keep"


class TokenizerAs(StrEnum):
    """Whose ids a tokenizer gives."""

    FILE = "file"
    AUTO = "auto"


class OnMiss(StrEnum):
    """What to do when the dataset is not in the cache."""

    BUILD = "build"
    ERROR = "error"


class OnUnwritable(StrEnum):
    """What to do when the cache can't be written."""

    ERROR = "error"
    TEMPORARY = "temporary"


class OnBadRow(StrEnum):
    """What a bad row does to the build."""

    ERROR = "error"
    QUARANTINE = "quarantine"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions(FormatOptions):
    """What `prepare` can be told, besides the sources."""

    tokenizer: str = option("Tokenizer: a folder, a tokenizer.json, or a hub name", "")
    tokenizer_revision: str | None = option("Revision of a tokenizer from the hub")
    tokenizer_as: TokenizerAs | None = option(
        "Whose ids: file (tokenizer.json) or auto (transformers' AutoTokenizer); default: file, and both must agree"
    )
    template: str | None = option("Chat template: a file, or the name of one of the tokenizer's templates")
    template_vars: Mapping[str, Any] = field(
        default_factory=dict,
        metadata={"help": "Template variable, for example enable_thinking=false", "flag": "template-var"},
    )
    date: datetime.date | None = option("Date that templates print (YYYY-MM-DD); default: today, resolved once")
    regions: RegionsMode = option("Whose word decides what the assistant wrote: auto, structure", RegionsMode.AUTO)
    stop: StopMode = option(
        "What ends an assistant's turn: template, or next-marker for templates that print no end token",
        StopMode.TEMPLATE,
    )
    eos: Eos = option("Append the end-of-sequence token to plain text and completions: auto, always, never", Eos.AUTO)
    special_tokens_in_text: SpecialText = option(
        "Special tokens inside messages: as-template, reject", SpecialText.AS_TEMPLATE
    )
    dropped_tool_calls: DroppedCalls = option(
        "Conversations whose tool calls the template drops: reject, keep", DroppedCalls.REJECT
    )
    split: str | None = option("Rows to take, for example train[:1000] or train[:50]+train[-50:]")
    limit: int | None = option("Take only the first N rows of those selected")
    config: str | None = option("Configuration of a hub dataset")
    revision: str | None = option("Revision of a hub dataset")
    max_row_bytes: int = option("Larger rows are rejected, not read into memory", 32_000_000)
    on_bad_row: OnBadRow = option("A bad row stops the build (error) or is set aside (quarantine)", OnBadRow.ERROR)
    quarantine_file: Path | None = option("Where to write rows set aside; default: beside the dataset")
    workers: str = option("Worker processes: a number, or auto", "auto")
    cache: Path | None = option("Cache folder; default: PENSTOCK_CACHE or ~/.cache/penstock")
    no_cache: bool = option("Build in a new temporary folder instead of the cache", False)
    force: bool = option("Make all slices anew, whatever the cache has", False)
    trust: Trust = option(
        "Shards of other users: checked (rows of each are compared with the references first), own (made again), all",
        Trust.CHECKED,
    )
    rank: int | None = option("Number of this process among those that share the work; default: from Slurm or torchrun")
    world_size: int | None = option("How many processes share the work; default: from Slurm or torchrun")
    on_miss: OnMiss = option("When the dataset is not there: build, error", OnMiss.BUILD)
    on_unwritable: OnUnwritable = option(
        "When the cache can't be written: error, or build once per host in a temporary folder", OnUnwritable.ERROR
    )
    fast: bool = option("Use the fast engines; the result is the same without", True)


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean …?` for a name that is not known, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def prepare_options(values: Mapping[str, Any]) -> PrepareOptions:
    """Options from names and values; unknown names and wrong values are errors that say what would be right."""
    from pydantic import ValidationError

    known = [f.name for f in fields(PrepareOptions)]
    for name in values:
        if name not in known:
            raise UsageError(f"unknown option {name!r}.{nearest(name, known)}")
    try:
        options: PrepareOptions = _adapter().validate_python({name: _plain(value) for name, value in values.items()})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "options"
        raise UsageError(f"{where}: {first['msg']} (got {first['input']!r})") from error
    if not options.tokenizer:
        raise UsageError("no tokenizer given: name a folder, a tokenizer.json or a hub model with --tokenizer")
    if options.quarantine_file is not None:
        local_path(options.quarantine_file, "--quarantine-file")
    if options.limit is not None and options.limit < 1:
        raise UsageError(f"--limit {options.limit}: expected a number of rows from 1 on")
    if options.workers != "auto" and (not options.workers.isdigit() or int(options.workers) < 1):
        raise UsageError(f"--workers {options.workers}: expected a number from 1 on, or auto")
    return options


def _plain(value: Any) -> Any:
    """Programs give paths and numbers where the command line gives text."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return str(value) if type(value) is int else value


@cache
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(PrepareOptions)
