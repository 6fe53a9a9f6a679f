"""Detects what a file is from its first bytes, with the name as a cross-check.

Costs one small read. The bytes decide because names mislead: a `.json` file is often JSON lines, a `.jsonl` file
sometimes an array. A contradiction that can't be intended, such as a `.parquet` file of text, is an error.
"""

from __future__ import annotations

import contextlib
import re
from enum import StrEnum
from pathlib import PurePath

import orjson

from penstock.errors import SourceError
from penstock.prepare.sources.chunks import Compression, chunks
from penstock.prepare.sources.remote import SourcePath
from penstock.transient import retry_transient

HEAD_BYTES = 65_536
WHITESPACE = b" \t\r\n"
UTF8_BOM = b"\xef\xbb\xbf"
ZSTD = re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")  # a frame, or a skippable one as pzstd writes first

DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TEXT_SUFFIXES = (*JSON_SUFFIXES, *DELIMITERS)
ARROW_SUFFIXES = (".arrow",)
PARQUET_SUFFIXES = (".parquet", ".pq")
BINARY_SUFFIXES = ARROW_SUFFIXES + PARQUET_SUFFIXES
COMPRESSED_SUFFIXES: dict[str, Compression] = {".gz": Compression.GZIP, ".zst": Compression.ZSTD}


class FileKind(StrEnum):
    """How rows are stored in a file. The values appear in stored plans, so they never change."""

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
    JOINED = "joined"  # a run of small files of JSON lines

    @property
    def compression(self) -> Compression:
        """The compression of the file's text."""
        if self.endswith("_gz"):
            return Compression.GZIP
        return Compression.ZSTD if self.endswith("_zst") else Compression.NONE

    @property
    def is_array(self) -> bool:
        """Whether the rows are the elements of one JSON array."""
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
        """Whether the rows are JSON text."""
        return self not in (FileKind.PARQUET, FileKind.ARROW)

    @property
    def is_streamed(self) -> bool:
        """Whether rows can only be found by reading from the start, so that slices carry their data."""
        return self.is_text and self is not FileKind.JSONL

    @property
    def is_as_large(self) -> bool:
        """Whether the rows take about as many bytes as the file."""
        return self is FileKind.JOINED or not self.is_streamed


def has_data_suffix(path: PurePath) -> bool:
    """Whether the suffix is that of a supported kind."""
    inner = _without_compression(path.name)
    suffix = _suffix(inner)
    return suffix in TEXT_SUFFIXES or (inner == path.name and suffix in BINARY_SUFFIXES)


def data_stem(path: PurePath) -> str:
    """The path without the suffixes of its kind."""
    inner = _without_compression(str(path))
    return inner.removesuffix(PurePath(inner).suffix)


@retry_transient
def _start(path: SourcePath) -> bytes:
    """The first bytes of a file."""
    with path.open("rb", buffering=0) as file:
        return bytes(file.read(HEAD_BYTES))


def detect_kind(path: SourcePath, name: str) -> FileKind:
    """Detect the kind of a file; SourceError if it can't be read."""
    try:
        start = _start(path)
    except OSError as error:
        raise SourceError(f"{name}: can't be read: {error.strerror}. Check its permissions.") from error
    head = start[:8]
    if not head:
        raise SourceError(f"{name}: the file is empty. Leave it out, or write rows to it first.")
    kind = _binary_kind(head)
    _check_suffix(_suffix(path.name), name, kind, head)
    if kind is not None:
        return kind
    packing = _compression(head)
    stem = _suffix(_without_compression(path.name))
    if stem in DELIMITERS:
        packed = {Compression.NONE: "", Compression.GZIP: "_gz", Compression.ZSTD: "_zst"}[packing]
        return FileKind(stem[1:] + packed)
    is_array = _is_array(path, name, start if packing is Compression.NONE else _unpacked(path, name, packing))
    match packing:
        case Compression.NONE:
            return FileKind.JSON_ARRAY if is_array else FileKind.JSONL
        case Compression.GZIP:
            return FileKind.JSON_ARRAY_GZ if is_array else FileKind.JSONL_GZ
        case Compression.ZSTD:
            return FileKind.JSON_ARRAY_ZST if is_array else FileKind.JSONL_ZST


def _without_compression(name: str) -> str:
    return name[: name.rindex(".")] if _suffix(name) in COMPRESSED_SUFFIXES else name


def _suffix(name: str) -> str:
    """The suffix of a file name, in lower case."""
    at = name.rfind(".")
    return name[at:].lower() if 0 < at < len(name) - 1 else ""  # as `PurePath.suffix`, which takes longer


def _binary_kind(head: bytes) -> FileKind | None:
    if head.startswith(b"PAR1"):
        return FileKind.PARQUET
    return FileKind.ARROW if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")) else None


def _compression(head: bytes) -> Compression:
    if head.startswith(b"\x1f\x8b"):
        return Compression.GZIP
    return Compression.ZSTD if ZSTD.match(head) else Compression.NONE


def _check_suffix(suffix: str, name: str, kind: FileKind | None, head: bytes) -> None:
    """Reject a file whose bytes contradict its binary suffix."""
    checks = {
        "a Parquet": (suffix in PARQUET_SUFFIXES, kind is FileKind.PARQUET),
        "an Arrow": (suffix in ARROW_SUFFIXES, kind is FileKind.ARROW),
        "a gzip": (suffix == ".gz", _compression(head) is Compression.GZIP),
        "a zstd": (suffix == ".zst", _compression(head) is Compression.ZSTD),
    }
    for what, (expected, found) in checks.items():
        if expected and not found:
            raise SourceError(
                f"{name}: not {what} file: it starts with {head!r} at byte 0. "
                "It may be truncated or misnamed: download it again, or rename it."
            )


def _unpacked(path: SourcePath, name: str, packing: Compression) -> bytes:
    """The first text of a compressed file."""
    with contextlib.closing(chunks(path, name, packing, HEAD_BYTES)) as stream:
        return next(stream, b"")


def _is_array(path: SourcePath, name: str, head: bytes) -> bool:
    """Whether JSON text is one array; SourceError if it is neither an array nor JSON lines."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise SourceError(f"{name}: UTF-16 text. Convert it: iconv -f UTF-16 -t UTF-8 {path.name} > utf8.jsonl")
    text = head.removeprefix(UTF8_BOM).lstrip(WHITESPACE)
    if text.startswith(b"["):
        return True
    named_json = _suffix(_without_compression(path.name)) in JSON_SUFFIXES
    if text and not text.startswith(b"{") and not named_json:
        raise SourceError(
            f"{name}: not JSON lines, a JSON array, Parquet or Arrow: it starts with {text[:12]!r}. "
            "Convert it to JSON lines, one JSON object per line; CSV and TSV are known by the names .csv and .tsv."
        )
    if _is_multiline_object(text):
        raise SourceError(
            f"{name}: one JSON object over several lines, not a list of rows. Write one row per line: "
            f"jq -c '.data[]' {path.name} > rows.jsonl, with the key that holds the rows in place of 'data' "
            "(or jq -c . for a sequence of objects)."
        )
    return False


def _is_multiline_object(text: bytes) -> bool:
    """Whether the first line is not a JSON value and the next one can't start a row."""
    first, newline, rest = text.partition(b"\n")
    following = rest.lstrip(b"\r\n")
    if not text.startswith(b"{") or not newline or not following or following.startswith(b"{"):
        return False
    try:
        orjson.loads(first)
    except orjson.JSONDecodeError:
        return True
    return False
