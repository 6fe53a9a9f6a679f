"""Columnar sources: Parquet and Arrow files. The modules import pyarrow; `sources.reading` loads them on demand."""
