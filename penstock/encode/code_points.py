"""What kinds of code points texts contain: newer than the engines' Unicode tables, or in need of normalisation.

Enter UTF-8 texts; leave the numbers of those that need care. ASCII costs a look at memory speed; all other characters
are looked up in one table, which is filled as code points turn up. Only where there are marks, or characters that
normalisation would change, is normalisation tried, on these and their neighbours.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.encode.unassigned import uncertain

NEWER: Final = 1
COMPOSES: Final = 2  # may compose with what precedes it, or is not NFC by itself
REORDERS: Final = 4  # a mark that does not compose, but has its place among others
_UNSEEN: Final = 128
_ASCII: Final = bytes(range(128))
_kinds = np.full(0x110000, _UNSEEN, np.uint8)


class Findings(NamedTuple):
    """Numbers of texts, sorted."""

    newer: list[int]  # code points newer than Unicode 14
    decomposed: list[int]  # not in NFC


def inspect_texts(texts: Sequence[bytes]) -> Findings:
    """Which of the texts need care."""
    foreign = [k for k, text in enumerate(texts) if not text.isascii()]
    strings = [texts[k].translate(None, _ASCII).decode() for k in foreign]
    kinds = _kinds_of(_code_points("".join(strings)))
    places = np.flatnonzero(kinds != 0)
    if not len(places):
        return Findings([], [])
    owners = np.searchsorted(np.cumsum([len(string) for string in strings]), places, side="right")
    newer = np.unique(owners[(kinds[places] & NEWER) > 0]).tolist()
    composing = np.unique(owners[(kinds[places] & COMPOSES) > 0]).tolist()
    marked = np.unique(owners[(kinds[places] & REORDERS) > 0])
    decomposed = [n for n in composing if not is_composed(texts[foreign[n]].decode())]
    # Without characters that may compose, Python tells by a quick look.
    for n in np.setdiff1d(marked, composing).tolist():
        if not unicodedata.is_normalized("NFC", texts[foreign[n]].decode()):
            decomposed.append(n)
    return Findings([foreign[n] for n in newer], [foreign[n] for n in sorted(decomposed)])


def is_composed(text: str) -> bool:
    """Whether a text is in NFC. Only characters that may compose, and those right before them, need be looked at:
    all others are NFC by themselves and nothing composes across them."""
    points = _code_points(text)
    near = (_kinds_of(points) & (COMPOSES | REORDERS)) > 0
    near[:-1] |= near[1:].copy()
    return unicodedata.is_normalized("NFC", points[near].tobytes().decode("utf-32-le"))


@lru_cache(4096)
def may_compose(character: str) -> bool:
    """Whether a character may compose or change places with what precedes it, or is not in NFC itself."""
    return bool(_kinds_of(_code_points(character))[0] & (COMPOSES | REORDERS))


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _kinds_of(code_points: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    kinds = _kinds[code_points]
    if kinds.max(initial=0) == _UNSEEN:
        for code_point in np.unique(code_points[kinds == _UNSEEN]).tolist():
            _kinds[code_point] = _kind(code_point)
        kinds = _kinds[code_points]
    return kinds


def _kind(code_point: int) -> int:
    if uncertain()[code_point]:
        return NEWER | COMPOSES
    character = chr(code_point)
    if code_point in _seconds() or 0x1100 <= code_point < 0x1200 or not unicodedata.is_normalized("NFC", character):
        return COMPOSES
    return REORDERS if unicodedata.combining(character) else 0


@cache
def _seconds() -> frozenset[int]:
    """All that some character has as the second of its two parts; conjoining jamo, which follow a rule, are not listed.
    No such character lies beyond the second plane."""
    parts = (unicodedata.decomposition(chr(code_point)).split() for code_point in range(0x20000))
    return frozenset(int(pair[1], 16) for pair in parts if len(pair) == 2 and not pair[0].startswith("<"))
