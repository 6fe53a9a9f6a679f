"""Inner loops that are compiled, from the C beside this file.

`native` is None where Penstock was installed without a compiler: each loop has a twin in Python at the place where it
is used, which gives the same to the byte. Costs per MB: reading 2 ms, filling 0.5, the others 0.2 to 0.4; the twins
take three times as long.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Layout", "native"]


class Layout(NamedTuple):
    """How plain rows are laid out. Keys and names are UTF-8."""

    messages: bytes  # the key of rows
    role: bytes  # the keys of messages
    content: bytes
    calls: bytes  # b"": messages with calls are not plain
    ignored: tuple[bytes, ...]  # keys of messages with texts that nobody reads
    columns: tuple[bytes, ...]  # keys of rows with values that nobody reads
    roles: tuple[bytes, ...]  # names
    answers: int  # so many of them, the first ones, are those of answers


class Native(Protocol):
    """What is compiled."""

    def read(
        self, rows: list[bytes], left: bytes, layout: Layout, /
    ) -> tuple[list[int], list[int], bytes, list[bytes | None], list[tuple[int, bytes | None]]]:
        """Read all plain rows but those that are flagged as left to others. The answer are the numbers of the rows and
        how many messages each has; then, message after message, the number of its role and its content; and the places
        of messages that are more, or less, than words, with their calls, if any, as JSON that was not looked at."""

    def fill(
        self,
        words: list[Any],
        numbers: npt.NDArray[Any],
        offsets: npt.NDArray[Any],
        before: list[bytes],
        after: list[bytes],
        trims: npt.NDArray[Any],
        /,
    ) -> tuple[list[bytes], bytes]:
        """The texts of rows, and for each message how many bytes of its words are there (as int64). Row k has messages
        offsets[k]:offsets[k+1]; message m stands between before[n] and after[n], where n is numbers[m]."""

    def pairs(self, texts: list[bytes], wanted: bytes, bits: bytes, /) -> bytes:
        """For each text the bits of the pairs of bytes that it has. The wanted ones stand one after the other, sorted,
        and each has a bit."""

    def kinds(self, texts: list[bytes], table: npt.NDArray[Any], /) -> bytes:
        """For each text the kinds of all its characters but ASCII, or-ed; the table has one for each code point."""

    def split(self, text: bytes, /) -> list[bytes]:
        """text.split(b"\\n"), which looks at one byte after the other."""


native: Native | None
try:
    native = cast(Native, importlib.import_module("penstock.native._native"))
except ImportError:
    native = None
