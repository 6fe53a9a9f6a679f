"""Stops: the end-of-turn token that closes an assistant's region, and the white space after it.

Enters: observations of a template and the tokenizer's special tokens; then regions. Leaves: the end tokens of a
recipe, and for one region where its stop starts and ends. Only the very end of a region is looked at, so that markers
inside messages change nothing. Costs one or two comparisons a region.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.arrays import Bool, Int64, UInt8
from penstock.regions.calibrate import Observation


def learn_end_tokens(
    observations: Sequence[Observation], special_tokens: frozenset[str], eos_token: str | None
) -> tuple[bytes, ...]:
    """The special tokens with which this template ends an assistant's turn, and the end-of-sequence token."""
    special = {token.encode() for token in special_tokens if token}
    ends = {(eos_token or "").encode()} & special
    for seen in observations:
        ending = seen.ending.rstrip()
        ends |= {max((token for token in special if ending.endswith(token)), key=len, default=b"")} - {b""}
    return tuple(sorted(ends, key=lambda token: (-len(token), token)))


def stops_answers(observations: Sequence[Observation], end_tokens: tuple[bytes, ...]) -> bool:
    """Whether some plain answer was seen to end with an end token."""
    return any(seen.plain and seen.ending.rstrip().endswith(end_tokens) for seen in observations)


class StopFinder:
    """Finds the stops of regions, given the end tokens, longest first."""

    def __init__(self, end_tokens: Sequence[bytes]) -> None:
        self.end_tokens = tuple(end_tokens)
        self._usual = [(token + tail, len(tail)) for token in end_tokens for tail in (b"\n", b"")]

    def find(self, data: bytes, starts: Int64, ends: Int64) -> tuple[Int64, Int64]:
        """Where the stops of these regions start and end; both are the region's end where it has none."""
        text = np.frombuffer(data, np.uint8)
        stop_starts, stop_ends = ends.copy(), ends.copy()
        left = np.arange(len(ends))
        for ending, tail in self._usual:
            if not len(left):
                break
            ended = ends_with(text, starts[left], ends[left], ending)
            found, left = left[ended], left[~ended]
            stop_starts[found] = ends[found] - len(ending)
            stop_ends[found] = ends[found] - tail
        for number in left.tolist():
            stop_starts[number], stop_ends[number] = self._before_blanks(data, int(starts[number]), int(ends[number]))
        return stop_starts, stop_ends

    def _before_blanks(self, data: bytes, start: int, end: int) -> tuple[int, int]:
        """The same for one region, with any white space after the stop."""
        if end > start and data[end - 1] in b" \t\n\r\x0b\x0c":
            last = start + len(data[start:end].rstrip())
            for token in self.end_tokens:
                if data.endswith(token, start, last):
                    return last - len(token), last
        return end, end


def ends_with(text: UInt8, starts: Int64, ends: Int64, ending: bytes) -> Bool:
    """For each region, whether it ends with these bytes."""
    return _matches(text, ends - len(ending), ends - starts >= len(ending), ending)


def begins_with(text: UInt8, starts: Int64, ends: Int64, beginning: bytes) -> Bool:
    """For each region, whether it begins with these bytes."""
    return _matches(text, starts, ends - starts >= len(beginning), beginning)


def _matches(text: UInt8, at: Int64, fits: Bool, wanted: bytes) -> Bool:
    """Byte by byte over all regions at once; regions that fail drop out early."""
    result = fits.copy()
    candidates = np.flatnonzero(fits)
    for offset, byte in enumerate(wanted):
        same = text[at[candidates] + offset] == byte
        if not same.all():
            candidates = candidates[same]
    result[:] = False
    result[candidates] = True
    return result
