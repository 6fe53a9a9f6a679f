"""What kinds of code points texts contain: newer than the engines' Unicode tables, or in need of normalisation.

Enter UTF-8 texts; leave the numbers of those that need care. ASCII texts cost a look at memory speed; the others are
joined and looked up in one table, which is filled as code points turn up. Only texts with marks, or with characters
that normalisation would change, are checked as a whole.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.encode.unassigned import uncertain

NEWER: Final = 1
COMPOSES: Final = 2  # may make a text not NFC
_UNSEEN: Final = 128
_kinds = np.full(0x110000, _UNSEEN, np.uint8)


class Findings(NamedTuple):
    """Numbers of texts, sorted."""

    newer: list[int]  # code points newer than Unicode 14
    decomposed: list[int]  # not in NFC


def inspect_texts(texts: Sequence[bytes]) -> Findings:
    """Which of the texts need care."""
    foreign = [k for k, text in enumerate(texts) if not text.isascii()]
    if not foreign:
        return Findings([], [])
    decoded = [texts[k].decode() for k in foreign]
    kinds = _kinds_of(np.frombuffer("".join(decoded).encode("utf-32-le"), np.uint32))
    if not kinds.any():
        return Findings([], [])
    ends = np.cumsum(np.fromiter(map(len, decoded), np.int64, len(decoded)))
    places = np.flatnonzero(kinds)
    owners, kinds = np.searchsorted(ends, places, side="right"), kinds[places]
    newer: list[int] = np.unique(owners[(kinds & NEWER) > 0]).tolist()
    marked: list[int] = np.unique(owners[(kinds & COMPOSES) > 0]).tolist()
    decomposed = [n for n in marked if not unicodedata.is_normalized("NFC", decoded[n])]
    return Findings([foreign[n] for n in newer], [foreign[n] for n in decomposed])


def _kinds_of(code_points: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    kinds = _kinds[code_points]
    unseen = kinds == _UNSEEN
    if unseen.any():
        for code_point in np.unique(code_points[unseen]).tolist():
            _kinds[code_point] = _kind(code_point)
        kinds = _kinds[code_points]
    return kinds


def _kind(code_point: int) -> int:
    if uncertain()[code_point]:
        return NEWER | COMPOSES
    character = chr(code_point)
    # Marks and conjoining jamo may compose with what precedes them; the others are NFC exactly when they are alone.
    joins = unicodedata.category(character).startswith("M") or 0x1100 <= code_point < 0x1200
    return COMPOSES if joins or not unicodedata.is_normalized("NFC", character) else 0
