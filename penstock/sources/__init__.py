"""Where rows come from: files, folders and hub datasets, cut into slices by content."""

from penstock.sources.discover import discover
from penstock.sources.kinds import FileKind
from penstock.sources.reading import KeepData, fetch_data, fetch_each, plan_slices, read_rows
from penstock.sources.slices import (
    SLICING_VERSION,
    FileIdentity,
    Slice,
    SlicePlan,
    SliceRows,
    SourceFile,
    TextRows,
    identity,
)
from penstock.sources.source_set import SourceSet
from penstock.sources.splits import Split, parse_split

__all__ = [
    "SLICING_VERSION",
    "FileIdentity",
    "FileKind",
    "KeepData",
    "Slice",
    "SlicePlan",
    "SliceRows",
    "SourceFile",
    "SourceSet",
    "Split",
    "TextRows",
    "discover",
    "fetch_data",
    "fetch_each",
    "identity",
    "parse_split",
    "plan_slices",
    "read_rows",
]
