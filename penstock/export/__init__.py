"""Writes prepared datasets in the formats of other trainers.

In: a view or mixture, a format name and a folder. Out: the folder, committed by a single rename; an export that was
killed resumes and ends in the same bytes.

`exporter.export` runs an export: `rows` reads the tokens in blocks, a format in `formats/` writes them part by part,
`folder` records finished parts and commits, `statistics` summarises them. To add a format, add a module to `formats/`.
`lazy.lazy_dataset` wraps a view as a `datasets.Dataset` without copying. Only `options` is imported here, so that the
command line starts fast.
"""

from penstock.export.options import ExportOptions, Weights, WriteOptions

__all__ = ["ExportOptions", "Weights", "WriteOptions"]
