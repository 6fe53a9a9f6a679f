"""Stops: the end-of-turn token that closes an assistant's region, and the white space after it.

Enters: observations of a template and the tokenizer's special tokens; then regions. Leaves: the end tokens of a
recipe, and for one region where its stop starts and ends. Only the very end of a region is looked at, so that markers
inside messages change nothing. Costs a slice and a comparison per region.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.chat.calibrate import Observation

_BLANKS = 64  # bytes of white space after a stop that the quick look covers


class Stop(NamedTuple):
    """Where the stop of a region starts and ends; both are the region's end where it has none."""

    start: int
    end: int


def learn_end_tokens(
    observations: Sequence[Observation], special_tokens: frozenset[str], eos_token: str | None
) -> tuple[bytes, ...]:
    """The special tokens with which this template ends an assistant's turn, and the end-of-sequence token."""
    ends = {eos_token} & special_tokens if eos_token else set()
    for seen in observations:
        ending = seen.ending.rstrip()
        ends |= {max((t for t in special_tokens if t and ending.endswith(t)), key=len, default="")} - {""}
    return tuple(sorted((token.encode() for token in ends), key=lambda token: (-len(token), token)))


def stops_answers(observations: Sequence[Observation], end_tokens: tuple[bytes, ...]) -> bool:
    """Whether some plain answer was seen to end with an end token."""
    return any(seen.plain and seen.ending.rstrip().encode().endswith(end_tokens) for seen in observations)


class StopFinder:
    """Finds the stop of regions, given the end tokens, longest first."""

    def __init__(self, end_tokens: Sequence[bytes]) -> None:
        self.end_tokens = tuple(end_tokens)
        self._window = _BLANKS + max(map(len, end_tokens), default=0)

    def find(self, data: bytes, start: int, end: int) -> Stop:
        """The stop of data[start:end]: its last text but for white space, if that is an end token."""
        window = data[max(start, end - self._window) : end]
        visible = window.rstrip()
        if len(window) - len(visible) > _BLANKS:
            window = data[start:end]
            visible = window.rstrip()
        last = end - len(window) + len(visible)
        for token in self.end_tokens:
            if visible.endswith(token):
                return Stop(last - len(token), last)
        return Stop(end, end)
