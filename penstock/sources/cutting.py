"""Where slices end: after a row (or row group, or record batch) whose content says so.

Because the decision looks at the item alone, beyond a smallest and a largest size, rows that are appended, inserted
or edited move only the boundaries next to them: the other slices, hence their digests, stay what they were.
"""

from __future__ import annotations

from typing import NamedTuple


class SliceSizes(NamedTuple):
    """Bounds of a slice in bytes. A single row larger than `largest` makes a slice of its own."""

    smallest: int = 1_000_000
    mean: int = 4_000_000
    largest: int = 8_000_000

    @property
    def rate(self) -> int:
        """An item of n bytes ends a slice if its 64-bit hash is below n times this: one end in `mean - smallest`."""
        return max(1, (1 << 64) // (self.mean - self.smallest))


SLICE_SIZES = SliceSizes()
