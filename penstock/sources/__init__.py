"""Finds source files and cuts them into slices of rows by content.

In: what the user names (files, globs, folders, URLs, Hub datasets) and an optional split. Out: `Slice` records, each
with a digest of its rows, and, for a worker that holds a slice, its rows as JSON bytes.

Slice boundaries depend on content alone, so appending or editing rows changes only the slices next to them. `discover`
resolves names to a `SourceSet`, whose `slices()` yields the slices; `read_rows` reads one of them. `text` and
`columnar` hold the readers by file kind; pyarrow is imported only for Parquet and Arrow files.
"""

from penstock.sources.discover import discover
from penstock.sources.kinds import FileKind
from penstock.sources.reading import KeepData, fetch_data, fetch_each, plan_slices, read_rows
from penstock.sources.remote.path import ObjectPath, SourcePath, path_from_json, path_to_json, recorded_path
from penstock.sources.slices import (
    SLICING_VERSION,
    FileIdentity,
    Identity,
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
    "Identity",
    "KeepData",
    "ObjectPath",
    "Slice",
    "SlicePlan",
    "SliceRows",
    "SourceFile",
    "SourcePath",
    "SourceSet",
    "Split",
    "TextRows",
    "discover",
    "fetch_data",
    "fetch_each",
    "identity",
    "parse_split",
    "path_from_json",
    "path_to_json",
    "plan_slices",
    "read_rows",
    "recorded_path",
]
