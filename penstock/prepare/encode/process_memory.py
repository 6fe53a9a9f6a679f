"""Measures this process's memory and returns free memory to the system. Precise with glibc, a fallback elsewhere."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # from malloc.h
_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


def resident_bytes() -> int:
    """Resident memory of this process; 0 if unknown."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE
    except OSError:
        return 0


def allocated_bytes() -> int:
    """Allocated bytes, or resident bytes if the allocator does not report them."""
    found = _mallinfo()
    return resident_bytes() if found is None else int(found.uordblks + found.hblkhd)


class GrowthWatch:
    """Reports when this process has allocated `limit` bytes more than at the start of the watch.

    Resident memory takes microseconds to read and bounds the growth. Only once it has grown by the limit is the
    allocator queried, which walks all its free blocks (up to 30 ms).
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.restart()

    def restart(self) -> None:
        """Measure growth from now on."""
        release_free_memory()  # or free resident memory could be reused unnoticed
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
    """Return freed memory to the system."""
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:  # without glibc, the allocator decides
        trim(0)


def map_large_blocks() -> None:
    """Always allocate large blocks with mmap, so that freeing them returns the memory to the system. By default, glibc
    raises its mmap threshold once such a block has been freed."""
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
