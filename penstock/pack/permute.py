"""Permutations that are computed where they are asked for: no shuffled array, no state.

Enters: positions, the size of the set they count in, and a key. Leaves: their images under a permutation of that set
which depends on (size, key) alone, the same on every machine. So step one million costs what step zero costs.

A Feistel network over pairs of digits in base ⌈√size⌉; an image outside the set is sent through again (the square
exceeds the set by little, so that is rare). Costs about 0.2 µs a position, and 0.1 ms a call.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import orjson
from blake3 import blake3

from penstock.arrays import Int64
from penstock.view.keyed import splitmix64
from penstock.view.runs import UInt64

_ROUNDS: Final = 7  # enough for sets of two and three, where digits are single bits
_NEXT: Final = np.uint64(0xD6E8FEB86659FD93)  # from the key of a round to that of the next
_HALF: Final = np.uint64(32)


def key_of(*parts: int | str) -> int:
    """A 64-bit key for these values; different values give unrelated keys."""
    return int.from_bytes(blake3(orjson.dumps([_plain(part) for part in parts])).digest(8), "little")


def _plain(part: int | str) -> str:
    return str(part)  # seeds may exceed what JSON numbers hold


def permuted(positions: Int64, sizes: int | Int64, keys: int | UInt64) -> Int64:
    """Where each position goes inside 0:size. Sizes and keys may differ from position to position."""
    size = np.broadcast_to(np.asarray(sizes, np.uint64), positions.shape)
    key = np.broadcast_to(np.asarray(keys, np.uint64), positions.shape)
    images = positions.astype(np.uint64)
    if (images >= size).any():
        raise IndexError("a position lies outside the set to permute")
    base = _base(size)
    images = _network(images, base, key)
    outside = np.flatnonzero(images >= size)
    while len(outside):
        images[outside] = _network(images[outside], base[outside], key[outside])
        outside = outside[images[outside] >= size[outside]]
    return images.astype(np.int64)


def _base(size: UInt64) -> UInt64:
    """The smallest number whose square holds the set."""
    base = np.sqrt(size.astype(np.float64)).astype(np.uint64)
    base += base * base < size
    return base


def _network(values: UInt64, base: UInt64, key: UInt64) -> UInt64:
    left, right = values // base, values % base
    for _ in range(_ROUNDS):
        left, right = right, (left + (splitmix64(right + key) >> _HALF)) % base
        key = key + _NEXT
    return left * base + right
