"""Streams a file's decompressed bytes in chunks.

Memory is bounded, even for a file that expands a thousandfold. A truncated or damaged file raises a SourceError with
the position instead of ending early. Throughput of decompressed text: plain about 10 GB/s from the page cache, gzip
about 0.3 GB/s, zstd about 0.6 GB/s.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Generator
from enum import Enum
from os import SEEK_END
from pathlib import Path
from typing import BinaryIO

import zstandard

from penstock.errors import SourceError

CHUNK_BYTES = 1 << 18
ZSTD_HEADER_BYTES = 18  # maximum size of a frame header
SMALL_BYTES = 1 << 9  # of a gzip member, decompressed first
PADDING = re.compile(rb"(?:\0|\x1f\x8b\x08\0.{6}\x03\0{9})+", re.DOTALL)  # padding and empty gzip members
GZIP_WINDOW = 31  # zlib's wbits value for "expect a gzip header"


class Compression(Enum):
    """How a file's text is compressed."""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"


Chunks = Generator[bytes, None, None]


def chunks(path: Path, name: str, packing: Compression, size: int = CHUNK_BYTES) -> Chunks:
    """Stream the decompressed text of a file."""
    try:
        file = path.open("rb", buffering=0)
        try:
            yield from decompressed(file, name, packing, size)
        finally:
            with contextlib.suppress(OSError):  # everything needed has been read
                file.close()
    except OSError as error:
        raise SourceError(f"{name}: can't be read: {error.strerror}.") from error


def decompressed(file: BinaryIO, name: str, packing: Compression, size: int = CHUNK_BYTES) -> Chunks:
    """Stream the decompressed text of an open file, unbuffered."""
    match packing:
        case Compression.NONE:
            while chunk := file.read(size):
                yield chunk
        case Compression.GZIP:
            yield from _gunzip(file, name, size)
        case Compression.ZSTD:
            yield from _unzstd(file, name, size)


def _gunzip(file: BinaryIO, name: str, size: int) -> Chunks:
    """Decompress all members of a gzip file (`cat a.gz b.gz` is valid); trailing zero padding is allowed."""
    packed, at = b"", 0
    unpacker, window = None, 0
    while True:
        if at == len(packed):
            packed, at = file.read(CHUNK_BYTES), 0
            if not packed:
                break
        if unpacker is None:
            nothing = PADDING.match(packed, at)
            at = nothing.end() if nothing else at
            if at == len(packed):
                continue
            window, unpacker = SMALL_BYTES, zlib.decompressobj(GZIP_WINDOW)
        piece = packed[at : at + window]  # starts small, because what follows the end of a member is copied
        try:
            chunk = unpacker.decompress(piece, size)
        except zlib.error as error:
            position = file.tell() - len(packed) + at
            what = f"damaged gzip data after byte {position}: {error}. Download it again."
            raise SourceError(f"{name}: {what}") from error
        if chunk:
            yield chunk
        at += len(piece) - len(unpacker.unused_data) - len(unpacker.unconsumed_tail)
        unpacker, window = None if unpacker.eof else unpacker, min(4 * window, CHUNK_BYTES)
    while unpacker is not None and (chunk := unpacker.decompress(b"", size)):
        yield chunk
    if unpacker is not None and not unpacker.eof:
        raise SourceError(f"{name}: the gzip data is truncated at byte {file.tell()}. Download it again.")


def _unzstd(file: BinaryIO, name: str, size: int) -> Chunks:
    """Decompress all frames of a zstd file."""
    try:
        with zstandard.ZstdDecompressor().stream_reader(file, CHUNK_BYTES, True, closefd=False) as reader:
            while chunk := reader.read(size):
                yield chunk
    except zstandard.ZstdError as error:
        what = f"damaged zstd data before byte {file.tell()}: {error}. Download it again."
        raise SourceError(f"{name}: {what}") from error
    end = _zstd_end(file)
    if end != file.seek(0, SEEK_END):
        raise SourceError(f"{name}: the zstd data is truncated at byte {file.tell()}. Download it again.")


def _zstd_end(file: BinaryIO) -> int:
    """The offset at which the last frame must end, from the block sizes; -1 if undetermined.

    Needed because the reader can't tell a truncated file from a short one.
    """
    position = 0
    while head := _read_at(file, position, ZSTD_HEADER_BYTES):
        if head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5:  # a skippable frame
            position += 8 + int.from_bytes(head[4:8], "little")
            continue
        try:
            position += zstandard.frame_header_size(head)
            checksum = 4 if zstandard.get_frame_parameters(head).has_checksum else 0
        except zstandard.ZstdError:
            return -1
        last = False
        while not last:
            header = _read_at(file, position, 3)
            if len(header) < 3:
                return -1
            block = int.from_bytes(header, "little")
            last, is_repeat = bool(block & 1), block >> 1 & 3 == 1
            position += 3 + (1 if is_repeat else block >> 3)
        position += checksum
    return position


def _read_at(file: BinaryIO, position: int, count: int) -> bytes:
    file.seek(position)
    return file.read(count)
