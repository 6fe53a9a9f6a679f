"""Finds stops: the end-of-turn token that closes an assistant's region, before any trailing white space.

The end tokens of a recipe are learned from observations of its template and the tokenizer's special tokens. Only the
very end of a region is searched, so that markers inside messages have no effect. A region takes one or two comparisons.

Two other rules end a turn: `--stop next-marker` (`structure.py`), for templates that print the stop with the next turn,
and `--eos` for plain text (`build/slices/pipeline.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.arrays import Bool, Int64, UInt8
from penstock.regions.calibrate import Observation


def learn_end_tokens(
    observations: Sequence[Observation], special_tokens: frozenset[str], eos_token: str | None
) -> tuple[bytes, ...]:
    """The special tokens with which a template ends an assistant's turn, and the end-of-sequence token."""
    special = {token.encode() for token in special_tokens if token}
    ends = {(eos_token or "").encode()} & special
    lengths = sorted({len(token) for token in special}, reverse=True)
    for seen in observations:
        ending = seen.ending.rstrip()
        fitting = (ending[-length:] for length in lengths if ending[-length:] in special)
        ends |= {next(fitting, b"")} - {b""}
    return tuple(sorted(ends, key=lambda token: (-len(token), token)))


def stops_answers(observations: Sequence[Observation], end_tokens: tuple[bytes, ...]) -> bool:
    """Whether an end token was observed after a plain answer."""
    return any(seen.plain and seen.ending.rstrip().endswith(end_tokens) for seen in observations)


class StopFinder:
    """Finds the stops of regions; end tokens are given longest first."""

    def __init__(self, end_tokens: Sequence[bytes]) -> None:
        self.end_tokens = tuple(end_tokens)
        self._usual = [(token + tail, len(tail)) for token in end_tokens for tail in (b"\n", b"")]

    def find(self, data: bytes, starts: Int64, ends: Int64) -> tuple[Int64, Int64]:
        """Where the stop of each region starts and ends; both are the end of the region if it has none."""
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
        """Finds the stop of one region before any amount of white space."""
        if end > start and data[end - 1] in b" \t\n\r\x0b\x0c":
            last = start + len(data[start:end].rstrip())
            for token in self.end_tokens:
                if data.endswith(token, start, last):
                    return last - len(token), last
        return end, end


def ends_with(text: UInt8, starts: Int64, ends: Int64, ending: bytes) -> Bool:
    """Whether each region ends with these bytes."""
    return _matches(text, ends - len(ending), ends - starts >= len(ending), ending)


def begins_with(text: UInt8, starts: Int64, ends: Int64, beginning: bytes) -> Bool:
    """Whether each region begins with these bytes."""
    return _matches(text, starts, ends - starts >= len(beginning), beginning)


def _matches(text: UInt8, at: Int64, fits: Bool, wanted: bytes) -> Bool:
    """Compares byte by byte over all regions at once; mismatching regions drop out early."""
    result = fits.copy()
    candidates = np.flatnonzero(fits)
    for offset, byte in enumerate(wanted):
        same = text[at[candidates] + offset] == byte
        if not same.all():
            candidates = candidates[same]
    result[:] = False
    result[candidates] = True
    return result
