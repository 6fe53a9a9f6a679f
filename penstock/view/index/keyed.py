"""Stateless pseudo-random numbers: maps a 64-bit word and a key to a uniform word, on every machine and numpy version.

Hold-outs, mixtures and shuffles are built on it. The cost is a few nanoseconds per word.
"""

from __future__ import annotations

import numpy as np

from penstock.arrays import Int64
from penstock.view.runs import UInt64


def splitmix64(words: UInt64) -> UInt64:
    """The finaliser of SplitMix64, a bijection of 64-bit words with good avalanche."""
    mixed = words + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def keyed_hashes(words: UInt64, key: int) -> UInt64:
    """Mix words with a key: uniform, and independent between keys."""
    return splitmix64(words ^ splitmix64(np.array([key], np.uint64)))


def keyed_permutation(size: int, key: int) -> Int64:
    """A permutation of 0 to size-1 that depends only on the key."""
    return np.argsort(keyed_hashes(np.arange(size, dtype=np.uint64), key))
