"""Hashes as randomness: a 64-bit word and a key give a uniform word, the same on every machine and numpy version.

Hold-outs, mixtures and orders are built on it; nothing here has state. Costs a few nanoseconds a word.
"""

from __future__ import annotations

import numpy as np

from penstock.arrays import Int64
from penstock.view.runs import UInt64


def splitmix64(words: UInt64) -> UInt64:
    """The finaliser of SplitMix64: a bijection of 64-bit words that scatters neighbours."""
    mixed = words + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def keyed_hashes(words: UInt64, key: int) -> UInt64:
    """Words mixed with a key: uniform, and unrelated between keys."""
    return splitmix64(words ^ splitmix64(np.array([key], np.uint64)))


def keyed_permutation(size: int, key: int) -> Int64:
    """The numbers 0 to size-1 in an order that depends on the key alone."""
    return np.argsort(keyed_hashes(np.arange(size, dtype=np.uint64), key))
