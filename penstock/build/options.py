"""The options of `prepare`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from penstock.addresses import local_path
from penstock.errors import UsageError
from penstock.options import option, read_options
from penstock.other_names import prepare_values
from penstock.prepare.chat.messages import RESERVED_VARIABLES
from penstock.prepare.recipe import SOURCE, RecipeOptions
from penstock.store.trust import Trust


class OnDropped(StrEnum):
    """What to do about rows with parts that the model neither sees nor learns."""

    WARN = "warn"
    ERROR = "error"


class OnMiss(StrEnum):
    """What to do when the dataset is not in the cache."""

    BUILD = "build"
    ERROR = "error"


class OnUnwritable(StrEnum):
    """What to do when the cache can't be written."""

    ERROR = "error"
    TEMPORARY = "temporary"


class RunnerKind(StrEnum):
    """Where slices are prepared."""

    LOCAL = "local"
    RAY = "ray"


class OnBadRow(StrEnum):
    """What to do with a row that can't be prepared."""

    ERROR = "error"
    QUARANTINE = "quarantine"


CACHE, RUN = "Cache", "Run"  # panels of the help, after the usual ones


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions(RecipeOptions):
    """Options of `prepare`, besides the sources. Those without a panel are the usual ones."""

    split: str | None = option("Rows to take, for example train[:1000] or train[:50]+train[-50:]")
    limit: Annotated[int, Ge(1)] | None = option("Take only the first N rows of those selected")
    on_bad_row: OnBadRow = option("A bad row stops the build (error) or is set aside (quarantine)", OnBadRow.ERROR)
    on_dropped: OnDropped = option(
        "When tools, reasoning, columns or other parts of a row are not used: warn, error", OnDropped.WARN
    )
    workers: str = option("Worker processes: a number, or auto", "auto", also="int")
    cache: str | None = option(
        "Cache: a folder, or s3://BUCKET/PREFIX; default: PENSTOCK_CACHE or ~/.cache/penstock", also="os.PathLike[str]"
    )
    tokenizer_revision: str | None = option("Revision of a tokenizer from the hub", panel=SOURCE)
    config: str | None = option("Configuration of a hub dataset", panel=SOURCE)
    revision: str | None = option("Revision of a hub dataset", panel=SOURCE)
    quarantine_file: Path | None = option("Where to write rows set aside; default: beside the dataset", panel=SOURCE)
    local_cache: str | None = option(
        "Where shards of a cache in an object store are kept on this machine; default: PENSTOCK_LOCAL_CACHE or "
        "~/.cache/penstock-remote",
        panel=CACHE,
        also="os.PathLike[str]",
    )
    local_cache_bytes: Annotated[int, Ge(1)] | None = option(
        "Size of the local cache; the shards used longest ago are deleted; default: PENSTOCK_LOCAL_CACHE_BYTES, or all "
        "but 5% of the disk",
        panel=CACHE,
    )
    no_cache: bool = option("Build in a new temporary folder instead of the cache", False, panel=CACHE)
    force: bool = option("Rebuild all slices, whatever the cache has", False, panel=CACHE)
    rehash: bool = option(
        "Read the sources whole to find changes that file times don't show, as when written through a mapping",
        False,
        panel=CACHE,
    )
    trust: Trust = option(
        "Shards of other users: checked (rows of each are compared with the references first), own (rebuilt), all",
        Trust.CHECKED,
        panel=CACHE,
    )
    on_miss: OnMiss = option("When the dataset is not in the cache: build, error", OnMiss.BUILD, panel=CACHE)
    on_unwritable: OnUnwritable = option(
        "When the cache can't be written: error, or temporary (build once per host in a temporary folder)",
        OnUnwritable.ERROR,
        panel=CACHE,
    )
    rank: int | None = option(
        "This process's rank among those sharing the work; default: from Slurm or torchrun", panel=RUN
    )
    world_size: int | None = option("Number of processes sharing the work; default: from Slurm or torchrun", panel=RUN)
    runner: RunnerKind = option(
        "Where slices are prepared: local (processes of this machine), or ray (a cluster; needs penstock[ray])",
        RunnerKind.LOCAL,
        panel=RUN,
    )
    ray_address: str | None = option(
        "Ray cluster: HOST:PORT, auto, or local (start one on this machine); default: the running one, else local",
        choices=("auto", "local"),
        panel=RUN,
    )
    fast: bool = option("Use the fast engines; the result is the same without", True, panel=RUN)


def prepare_options(values: Mapping[str, Any]) -> PrepareOptions:
    """Reads options from names and values; the error for an unknown name or a wrong value lists what is accepted."""
    options = read_options(PrepareOptions, prepare_values(values), "prepare")
    if not options.tokenizer:
        raise UsageError("no tokenizer given: name a folder, a tokenizer.json or a hub model with --tokenizer")
    if options.quarantine_file is not None:
        local_path(options.quarantine_file, "--quarantine-file")
    if options.workers != "auto" and (not options.workers.isdigit() or int(options.workers) < 1):
        raise UsageError(f"--workers {options.workers}: expected a number from 1 on, or auto")
    for name in RESERVED_VARIABLES:
        if name in options.template_vars:
            raise UsageError(f"--template-var {name}: it is not a template variable. Remove the option")
    if options.ray_address is not None and options.runner is not RunnerKind.RAY:
        raise UsageError(f"--ray-address {options.ray_address}: it is only used with --runner ray")
    return options
