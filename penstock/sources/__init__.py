"""Where rows come from: files, folders and hub datasets, cut into slices by content."""

from penstock.sources.discover import discover
from penstock.sources.kinds import Kind
from penstock.sources.reading import Keep, fetch_data, fetch_each, plan, read_rows
from penstock.sources.slices import SLICING_VERSION, FileIdentity, Lines, Rows, Slice, SlicePlan, SourceFile, identity
from penstock.sources.source_set import SourceSet
from penstock.sources.splits import Split, parse_split

__all__ = [
    "SLICING_VERSION",
    "FileIdentity",
    "Keep",
    "Kind",
    "Lines",
    "Rows",
    "Slice",
    "SlicePlan",
    "SourceFile",
    "SourceSet",
    "Split",
    "discover",
    "fetch_data",
    "fetch_each",
    "identity",
    "parse_split",
    "plan",
    "read_rows",
]
