"""Finds source files and cuts them into slices of rows by content.

In: what the user names (files, globs, folders, URLs, Hub datasets) and an optional split. Out: `Slice` records, each
with a digest of its rows, and, for a worker that holds a slice, its rows as JSON bytes.

Slice boundaries depend on content alone, so appending or editing rows changes only the slices next to them. `discover`
resolves names to a `SourceSet`, whose `slices()` yields the slices; `reading.read_rows` reads one of them. `text_*` and
`joined` read text; `columnar`, `arrow` and `parquet` import pyarrow only when they are needed.
"""
