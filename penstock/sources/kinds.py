"""What a file is: decided by its first bytes, with the name as a cross-check. Enters a path, leaves a `Kind`.

Costs one small read. The bytes decide because names lie: a `.json` file is often JSON lines, a `.jsonl` file
sometimes an array. Where name and bytes contradict each other in a way that can't be meant, that is an error.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import orjson

from penstock.errors import SourceError
from penstock.sources.chunks import Compression, chunks

HEAD_BYTES = 65_536
WHITE = b" \t\r\n"
UTF8_BOM = b"\xef\xbb\xbf"

DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TEXT_SUFFIXES = (*JSON_SUFFIXES, *DELIMITERS)
ARROW_SUFFIXES = (".arrow",)
PARQUET_SUFFIXES = (".parquet", ".pq")
BINARY_SUFFIXES = ARROW_SUFFIXES + PARQUET_SUFFIXES
COMPRESSED_SUFFIXES: dict[str, Compression] = {".gz": Compression.GZIP, ".zst": Compression.ZSTD}


class Kind(StrEnum):
    """How the rows lie in a file. The values appear in stored plans, so they never change."""

    JSONL = "jsonl"
    JSONL_GZ = "jsonl_gz"
    JSONL_ZST = "jsonl_zst"
    JSON_ARRAY = "json_array"
    JSON_ARRAY_GZ = "json_array_gz"
    JSON_ARRAY_ZST = "json_array_zst"
    CSV = "csv"
    CSV_GZ = "csv_gz"
    CSV_ZST = "csv_zst"
    TSV = "tsv"
    TSV_GZ = "tsv_gz"
    TSV_ZST = "tsv_zst"
    PARQUET = "parquet"
    ARROW = "arrow"

    @property
    def compression(self) -> Compression:
        """How the file's text is packed."""
        if self.endswith("_gz"):
            return Compression.GZIP
        return Compression.ZSTD if self.endswith("_zst") else Compression.NONE

    @property
    def is_array(self) -> bool:
        """One JSON array holds the rows."""
        return self.startswith("json_array")

    @property
    def delimiter(self) -> str:
        """What stands between the cells of a row; '' where there are none."""
        return DELIMITERS.get(f".{self.partition('_')[0]}", "")

    @property
    def has_lines(self) -> bool:
        """Is a row a line? Else rows are counted."""
        return self.startswith("jsonl")

    @property
    def is_text(self) -> bool:
        """Rows are JSON text."""
        return self not in (Kind.PARQUET, Kind.ARROW)

    @property
    def is_streamed(self) -> bool:
        """Only a reader that starts at the beginning finds the rows, so slices carry their data."""
        return self.is_text and self is not Kind.JSONL


def has_data_suffix(path: Path) -> bool:
    """Whether the name promises one of the kinds that can be read."""
    inner = _without_compression(path)
    if inner.suffix.lower() in TEXT_SUFFIXES:
        return True
    return inner == path and path.suffix.lower() in BINARY_SUFFIXES


def data_stem(path: Path) -> Path:
    """The path without the suffixes that tell its kind."""
    return _without_compression(path).with_suffix("")


def kind_of(path: Path, name: str) -> Kind:
    """The kind of a file, or a SourceError that says why it can't be read."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise SourceError(f"{name}: can't be read: {error.strerror}. Check its permissions.") from error
    if not head:
        raise SourceError(f"{name}: the file is empty. Leave it out, or write rows to it first.")
    kind = _binary_kind(head)
    _check_suffix(path, name, kind, head)
    if kind is not None:
        return kind
    packing = _compression(head)
    stem = _without_compression(path).suffix.lower()
    if stem in DELIMITERS:
        packed = {Compression.NONE: "", Compression.GZIP: "_gz", Compression.ZSTD: "_zst"}[packing]
        return Kind(stem[1:] + packed)
    is_array = _is_array(path, name, packing)
    match packing:
        case Compression.NONE:
            return Kind.JSON_ARRAY if is_array else Kind.JSONL
        case Compression.GZIP:
            return Kind.JSON_ARRAY_GZ if is_array else Kind.JSONL_GZ
        case Compression.ZSTD:
            return Kind.JSON_ARRAY_ZST if is_array else Kind.JSONL_ZST


def _without_compression(path: Path) -> Path:
    return path.with_suffix("") if path.suffix.lower() in COMPRESSED_SUFFIXES else path


def _binary_kind(head: bytes) -> Kind | None:
    if head.startswith(b"PAR1"):
        return Kind.PARQUET
    return Kind.ARROW if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")) else None


def _compression(head: bytes) -> Compression:
    if head.startswith(b"\x1f\x8b"):
        return Compression.GZIP
    return Compression.ZSTD if head.startswith(b"\x28\xb5\x2f\xfd") else Compression.NONE


def _check_suffix(path: Path, name: str, kind: Kind | None, head: bytes) -> None:
    """Refuse a file whose name promises a binary kind that its bytes are not."""
    suffix = path.suffix.lower()
    promises = {
        "a Parquet": (suffix in PARQUET_SUFFIXES, kind is Kind.PARQUET),
        "an Arrow": (suffix in ARROW_SUFFIXES, kind is Kind.ARROW),
        "a gzip": (suffix == ".gz", _compression(head) is Compression.GZIP),
        "a zstd": (suffix == ".zst", _compression(head) is Compression.ZSTD),
    }
    for what, (promised, kept) in promises.items():
        if promised and not kept:
            raise SourceError(
                f"{name}: not {what} file: it starts with {head!r} at byte 0. "
                "It may be cut off or wrongly named; fetch it again or rename it."
            )


def _is_array(path: Path, name: str, packing: Compression) -> bool:
    """Whether JSON text is one array; raises for text that is neither an array nor JSON lines."""
    stream = chunks(path, name, packing, HEAD_BYTES)
    head = next(stream, b"")
    stream.close()
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise SourceError(f"{name}: UTF-16 text. Convert it: iconv -f UTF-16 -t UTF-8 {path.name} > utf8.jsonl")
    text = head.removeprefix(UTF8_BOM).lstrip(WHITE)
    if text.startswith(b"["):
        return True
    named_json = _without_compression(path).suffix.lower() in JSON_SUFFIXES
    if text and not text.startswith(b"{") and not named_json:
        raise SourceError(
            f"{name}: neither JSON lines, a JSON array, Parquet nor Arrow: it starts with {text[:12]!r}. "
            "Convert it to JSON lines, one JSON object a line; CSV and TSV are known by the names .csv and .tsv."
        )
    if _is_spread_object(text):
        raise SourceError(
            f"{name}: one JSON object spread over several lines, not a list of rows. Write one row a line: "
            f"jq -c '.data[]' {path.name} > rows.jsonl, with the key that holds the rows in place of 'data' "
            "(or jq -c . for objects that stand one after the other)."
        )
    return False


def _is_spread_object(text: bytes) -> bool:
    """A first line that is no JSON value, continued by a line that can't start a row."""
    first, newline, rest = text.partition(b"\n")
    following = rest.lstrip(b"\r\n")
    if not text.startswith(b"{") or not newline or not following or following.startswith(b"{"):
        return False
    try:
        orjson.loads(first)
    except orjson.JSONDecodeError:
        return True
    return False
