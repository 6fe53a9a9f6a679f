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
from pathlib import Path
from typing import Any, Protocol

import zstandard

from penstock.errors import SourceError
from penstock.prepare.sources.remote import SourcePath
from penstock.transient import retry_transient

CHUNK_BYTES = 1 << 18
SMALL_BYTES = 1 << 9  # of a gzip member, decompressed first
PADDING = re.compile(rb"(?:\0|\x1f\x8b\x08\0.{6}\x03\0{9})+", re.DOTALL)  # padding and empty gzip members
GZIP_WINDOW = 31  # zlib's wbits value for "expect a gzip header"


class Compression(Enum):
    """How a file's text is compressed."""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"


Chunks = Generator[bytes, None, None]


class Readable(Protocol):
    """A file that is read in order."""

    def read(self, size: int, /) -> bytes: ...

    def tell(self) -> int: ...


class SteadyFile:
    """A local file whose reads are repeated if its file system fails temporarily; a failed read does not move it."""

    def __init__(self, path: Path) -> None:
        file = retry_transient(path.open)("rb", buffering=0)
        self.read = retry_transient(file.read)
        self.seek, self.tell = retry_transient(file.seek), file.tell
        self._close = file.close

    def close(self) -> None:
        """Close the file; everything needed has been read."""
        with contextlib.suppress(OSError):
            self._close()


def chunks(path: SourcePath, name: str, packing: Compression, size: int = CHUNK_BYTES) -> Chunks:
    """Stream the decompressed text of a file."""
    try:
        with contextlib.closing(SteadyFile(path) if isinstance(path, Path) else path.open("rb", buffering=0)) as file:
            yield from decompressed(file, name, packing, size)
    except OSError as error:
        raise SourceError(f"{name}: can't be read: {error.strerror}.") from error


def decompressed(file: Readable, name: str, packing: Compression, size: int = CHUNK_BYTES) -> Chunks:
    """Stream the decompressed text of an open file, unbuffered."""
    match packing:
        case Compression.NONE:
            while chunk := file.read(size):
                yield chunk
        case Compression.GZIP:
            yield from _gunzip(file, name, size)
        case Compression.ZSTD:
            yield from _unzstd(file, name, size)


def _gunzip(file: Readable, name: str, size: int) -> Chunks:
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


def _unzstd(file: Readable, name: str, size: int) -> Chunks:
    """Decompress all frames of a zstd file."""
    frames: Any = _ZstdFrames(file)
    try:
        with zstandard.ZstdDecompressor().stream_reader(frames, CHUNK_BYTES, True, closefd=False) as reader:
            while chunk := reader.read(size):
                yield chunk
    except zstandard.ZstdError as error:
        what = f"damaged zstd data before byte {file.tell()}: {error}. Download it again."
        raise SourceError(f"{name}: {what}") from error
    if not frames.is_complete:
        raise SourceError(f"{name}: the zstd data is truncated at byte {file.tell()}. Download it again.")


class _ZstdFrames:
    """Passes a zstd file through, and follows its frames by their block sizes to see whether the last one is complete.

    Needed because the decompressor can't tell a truncated file from a short one.
    """

    def __init__(self, file: Readable) -> None:
        self._file = file
        self._steps = self._follow()
        self._wanted, self._skip = next(self._steps)  # bytes of the next header, and bytes before it
        self._held = b""

    def read(self, size: int) -> bytes:
        """Read on."""
        data = self._file.read(size)
        self._feed(data)
        return data

    @property
    def is_complete(self) -> bool:
        """Whether all that was read ends with a frame."""
        return self._skip == 0 and not self._held and self._between_frames

    def _feed(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            if self._skip:
                passed = min(self._skip, len(data) - at)
                self._skip -= passed
                at += passed
                continue
            part = data[at : at + self._wanted - len(self._held)]
            self._held += part
            at += len(part)
            if len(self._held) == self._wanted:
                header, self._held = self._held, b""
                self._wanted, self._skip = self._steps.send(header)

    def _follow(self) -> Generator[tuple[int, int], bytes, None]:
        """Yields the size of the next header and the bytes to skip before it; is sent the header."""
        skip = 0
        while True:
            self._between_frames = True
            head = yield 4, skip
            self._between_frames = False
            if head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5:  # a skippable frame
                skip = int.from_bytes((yield 4, 0), "little")
                continue
            descriptor = (yield 1, 0)[0]
            skip = yield from self._blocks(descriptor)
            skip += 4 if descriptor & 4 else 0  # the checksum

    def _blocks(self, descriptor: int) -> Generator[tuple[int, int], bytes, int]:
        """Follows the blocks of a frame whose header starts with this byte; returns the size of the last one."""
        single = descriptor >> 5 & 1
        content = (single, 2, 4, 8)[descriptor >> 6]
        skip = (1 - single) + (0, 1, 2, 4)[descriptor & 3] + content
        last = False
        while not last:
            block = int.from_bytes((yield 3, skip), "little")
            last, is_repeat = bool(block & 1), block >> 1 & 3 == 1
            skip = 1 if is_repeat else block >> 3
        return skip
