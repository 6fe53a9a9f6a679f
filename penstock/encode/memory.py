"""What memory this process has, and giving back what it does not need. glibc tells; elsewhere little is known."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of malloc.h
_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo(ctypes.Structure):
    """As in malloc.h."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


def resident_bytes() -> int:
    """Resident memory of this process (0 where the system does not tell)."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE
    except OSError:
        return 0


def allocated_bytes() -> int:
    """Bytes that are allocated; the resident ones where the allocator does not tell."""
    found = _mallinfo()
    return resident_bytes() if found is None else int(found.uordblks + found.hblkhd)


class GrowthWatch:
    """Tells when this process has come to allocate `limit` bytes more than when the watch began.

    Resident memory, which takes microseconds to read, bounds the growth: only once it has grown by the limit is the
    allocator asked, which walks all its free blocks (up to 30 ms).
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        release_free_memory()  # what is free and resident could be filled unseen
        self._allocated, self._resident = allocated_bytes(), resident_bytes()

    def exceeded(self) -> bool:
        """Whether the limit is reached."""
        if resident_bytes() - self._resident < self._limit:
            return False
        release_free_memory()
        grown = max(0, allocated_bytes() - self._allocated)
        self._resident = resident_bytes() - grown
        return grown >= self._limit


def release_free_memory() -> None:
    """Give freed memory back to the system."""
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:  # without glibc, memory goes back when the allocator sees fit
        trim(0)


def map_large_blocks() -> None:
    """Let the largest blocks of memory always be apart from the others, so that they go back to the system when they
    are freed. Left to itself, glibc puts them among the others as soon as it has seen one freed."""
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 16 << 20)
        mallopt(_TRIM_THRESHOLD, 32 << 20)


def _mallinfo() -> Any:
    mallinfo = getattr(_libc(), "mallinfo2", None)
    if mallinfo is None:  # not glibc, or one before 2.33
        return None
    mallinfo.restype = _Mallinfo
    return mallinfo()


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
