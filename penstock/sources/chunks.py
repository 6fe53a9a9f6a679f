"""A file's decompressed bytes as a stream of chunks. Enters a path, leaves chunks of about the asked size.

Guarantees bounded memory (also for a file that unpacks to a thousand times its size) and that a file which
is cut off or damaged raises a SourceError with the position, instead of ending early.
Costs: plain about 10 GB/s from the page cache, gzip about 0.3 GB/s and zstd about 0.6 GB/s of unpacked text.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator
from enum import Enum
from pathlib import Path
from typing import BinaryIO

import zstandard

from penstock.errors import SourceError

CHUNK_BYTES = 1 << 18
ZSTD_PIECE_BYTES = 1024  # unpacks to 32 MB at most (a block of 128 KB takes 4 bytes or more)
GZIP_WINDOW = 31  # zlib's number for "expect a gzip header"


class Compression(Enum):
    """How a file's text is packed."""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"


Chunks = Generator[bytes, None, None]


def chunks(path: Path, name: str, packing: Compression, size: int = CHUNK_BYTES) -> Chunks:
    """The text of a file, unpacked."""
    try:
        with path.open("rb", buffering=0) as file:
            match packing:
                case Compression.NONE:
                    while chunk := file.read(size):
                        yield chunk
                case Compression.GZIP:
                    yield from _gunzip(file, name, size)
                case Compression.ZSTD:
                    yield from _unzstd(file, name, size)
    except OSError as error:
        raise SourceError(f"{name}: can't be read: {error.strerror}.") from error


def _gunzip(file: BinaryIO, name: str, size: int) -> Chunks:
    """Every member of a gzip file (`cat a.gz b.gz` is valid), with zero padding after them allowed."""
    packed = _past_padding(file, b"")
    while packed:
        rest = yield from _gunzip_member(file, name, size, packed)
        packed = _past_padding(file, rest)


def _past_padding(file: BinaryIO, packed: bytes) -> bytes:
    while not (packed := packed.lstrip(b"\0")):
        packed = file.read(CHUNK_BYTES)
        if not packed:
            break
    return packed


def _gunzip_member(file: BinaryIO, name: str, size: int, packed: bytes) -> Generator[bytes, None, bytes]:
    """One member; returns the packed bytes read beyond its end."""
    unpacker = zlib.decompressobj(GZIP_WINDOW)
    while not unpacker.eof:
        try:
            chunk = unpacker.decompress(packed, size)
        except zlib.error as error:
            position = file.tell() - len(packed)
            raise SourceError(f"{name}: damaged gzip data after byte {position}: {error}. Fetch it again.") from error
        if chunk:
            yield chunk
        packed = unpacker.unconsumed_tail
        if not packed and not unpacker.eof and len(chunk) < size:  # else it still holds output back
            packed = file.read(CHUNK_BYTES)
            if not packed:
                raise SourceError(f"{name}: the gzip data is cut off at byte {file.tell()}. Fetch it again.")
    return unpacker.unused_data


def _unzstd(file: BinaryIO, name: str, size: int) -> Chunks:
    """Every frame of a zstd file. `stream_reader` would be simpler, but takes a cut-off file for a short one."""
    unpacker = zstandard.ZstdDecompressor().decompressobj()
    ready = bytearray()
    inside = False  # a frame has begun
    for packed in _pieces(file):
        while packed:
            try:
                ready += unpacker.decompress(packed)
            except zstandard.ZstdError as error:
                where = f"before byte {file.tell()}"
                raise SourceError(f"{name}: damaged zstd data {where}: {error}. Fetch it again.") from error
            packed, inside = b"", True
            if unpacker.eof:
                packed, inside = unpacker.unused_data, False
                unpacker = zstandard.ZstdDecompressor().decompressobj()
        if len(ready) >= size:
            yield bytes(ready)
            ready.clear()
    if inside:
        raise SourceError(f"{name}: the zstd data is cut off at byte {file.tell()}. Fetch it again.")
    if ready:
        yield bytes(ready)


def _pieces(file: BinaryIO) -> Chunks:
    """Compressed input in small pieces, because what one call unpacks from a piece is not bounded otherwise."""
    while block := file.read(CHUNK_BYTES):
        for start in range(0, len(block), ZSTD_PIECE_BYTES):
            yield block[start : start + ZSTD_PIECE_BYTES]
