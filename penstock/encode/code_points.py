"""Finds texts with code points newer than the engines' Unicode tables, and texts that are not in NFC.

ASCII is skipped at memory speed; all other characters are looked up in a table that is filled as code points occur.
Normalization is only tried where there are combining marks or characters that it would change, on these and their
neighbours.
"""

from __future__ import annotations

import unicodedata
from functools import cache, lru_cache
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.encode.unassigned import unassigned
from penstock.native import native

NEWER: Final = 1
COMPOSES: Final = 2  # may compose with its predecessor, or is not NFC by itself
REORDERS: Final = 4  # a combining mark that does not compose, but may be reordered
_UNSEEN: Final = 128
_STEP: Final = 1 << 13
_NOT_ASCII: Final = np.uint64(0x8080808080808080)
# The ranges of characters that decompose into two; a test scans all of Unicode.
_COMPOSED: Final = (range(0xC0, 0x3100), range(0xFB1D, 0xFB50), range(0x11000, 0x12000), range(0x1D100, 0x1D200))
_kinds = np.full(0x110000, _UNSEEN, np.uint8)


class Findings(NamedTuple):
    """Indices of texts, sorted."""

    newer: list[int]  # code points newer than Unicode 14
    decomposed: list[int]  # not in NFC


def inspect_texts(texts: list[bytes]) -> Findings:
    """Find the texts that need special treatment."""
    kinds = _kinds_in(texts)
    having = {kind: np.flatnonzero(kinds & kind).tolist() for kind in (NEWER, COMPOSES)}
    decomposed = [n for n in having[COMPOSES] if not is_composed(texts[n].decode())]
    # Without characters that may compose, Python's quick check is enough.
    for n in np.flatnonzero(kinds & (COMPOSES | REORDERS) == REORDERS).tolist():
        if not unicodedata.is_normalized("NFC", texts[n].decode()):
            decomposed.append(n)
    return Findings(having[NEWER], sorted(decomposed))


def _kinds_in(texts: list[bytes]) -> npt.NDArray[np.uint8]:
    """For each text, the kinds of its characters, or-ed."""
    if native is None:
        return _kinds_in_words(texts)
    kinds = np.frombuffer(native.kinds(texts, _kinds), np.uint8)
    unseen = np.flatnonzero(kinds & _UNSEEN).tolist()
    if not unseen:
        return kinds
    for n in unseen:
        _kinds_of(code_points(texts[n].decode()))
    return np.frombuffer(native.kinds(texts, _kinds), np.uint8)


def _kinds_in_words(texts: list[bytes]) -> npt.NDArray[np.uint8]:
    """The numpy version. Looks only at 8-byte words with non-ASCII bytes: multi-byte characters consist of such bytes,
    so they lie entirely within such words."""
    found = np.zeros(len(texts), np.uint8)
    data = b"".join([*texts, bytes(7)])
    words = np.frombuffer(data, np.uint64, len(data) // 8)
    foreign = np.flatnonzero(_has_more_than_ascii(words))
    points = code_points(words[foreign].tobytes().decode())
    kinds = _kinds_of(points)
    places = np.flatnonzero(kinds != 0)
    at = np.cumsum(utf8_widths(points), dtype=np.int64)[places] - 1  # last byte of each character
    owners = np.searchsorted(np.cumsum([len(text) for text in texts]), foreign[at // 8] * 8 + at % 8, side="right")
    np.bitwise_or.at(found, owners, kinds[places])
    return found


def is_composed(text: str) -> bool:
    """Whether a text is in NFC. Checks only characters that may compose and their predecessors: all others are NFC by
    themselves, and nothing composes across them."""
    points = code_points(text)
    near = (_kinds_of(points) & (COMPOSES | REORDERS)) > 0
    near[:-1] |= near[1:].copy()
    return unicodedata.is_normalized("NFC", points[near].tobytes().decode("utf-32-le"))


@lru_cache(4096)
def may_compose(character: str) -> bool:
    """Whether a character may compose or swap with its predecessor, or is not in NFC itself."""
    return bool(_kinds_of(code_points(character))[0] & (COMPOSES | REORDERS))


def code_points(text: str) -> npt.NDArray[np.uint32]:
    """The code points of a text."""
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def utf8_widths(points: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    """The UTF-8 length of each code point."""
    over = [(points >= bound).view(np.uint8) for bound in (0x80, 0x800, 0x10000)]
    return 1 + over[0] + over[1] + over[2]


def _has_more_than_ascii(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """For each word, in steps that fit the CPU caches."""
    found = np.empty(len(words), np.bool_)
    for start in range(0, len(words), _STEP):
        step = slice(start, start + _STEP)
        np.not_equal(words[step] & _NOT_ASCII, 0, out=found[step])
    return found


def _kinds_of(points: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    kinds = _kinds.take(points, mode="clip")
    unseen = points[kinds == _UNSEEN]
    if not len(unseen):
        return kinds
    for code_point in np.unique(unseen).tolist():
        _kinds[code_point] = _kind(code_point)
    return _kinds.take(points, mode="clip")


def _kind(code_point: int) -> int:
    if unassigned()[code_point]:
        return NEWER | COMPOSES
    character = chr(code_point)
    if (
        code_point in _second_code_points()
        or 0x1100 <= code_point < 0x1200
        or not unicodedata.is_normalized("NFC", character)
    ):
        return COMPOSES
    return REORDERS if unicodedata.combining(character) else 0


@cache
def _second_code_points() -> frozenset[int]:
    """All second code points of canonical pairs, without conjoining jamo, which follow a rule."""
    parts = (unicodedata.decomposition(chr(code_point)).split() for code_point in chain(*_COMPOSED))
    return frozenset(int(pair[1], 16) for pair in parts if len(pair) == 2 and not pair[0].startswith("<"))
