"""Turns rendered as inference sees them, arranged into examples and cut into segments."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.arrays import Int64
from penstock.errors import RowError
from penstock.regions.arrange import Arranger
from penstock.regions.chains import Chains
from penstock.regions.segments import Segments
from penstock.regions.splitter import Splitter
from penstock.template.rendered import Rendered


class ChainSegments(NamedTuple):
    """Examples to encode. Each text begins where the example departs from the last one of its row, the root."""

    texts: list[bytes]
    segments: Segments
    rows: Int64  # the conversation of each example
    order: Int64  # the position of each example within its row
    heads: Int64  # how many leading segments each example shares with the root
    seams: Int64  # where a text is split for encoding; 0 if it is not
    errors: dict[int, RowError]  # by conversation


def split_chains(arranger: Arranger, splitter: Splitter, rendered: Rendered) -> ChainSegments:
    """Arranges the turns of a batch into examples, and cuts them into segments."""
    chains = arranger.arrange(rendered)
    segments, errors = splitter.split_chains(chains)
    heads, misaligned = _heads(chains, segments)
    if misaligned:
        chains = arranger.arrange(rendered, frozenset(misaligned))
        segments, errors = splitter.split_chains(chains)
        heads, _ = _heads(chains, segments)  # examples that share nothing can't be misaligned
    order = np.arange(len(chains.rows)) - np.searchsorted(chains.rows, chains.rows)
    seams = np.where(segments.known, chains.seams, 0)
    return ChainSegments(chains.rendered.texts, segments, chains.rows, order, heads, seams, errors)


def _heads(chains: Chains, segments: Segments) -> tuple[Int64, set[int]]:
    """The number of leading segments each example shares with its root, and the rows where no segment ends there."""
    heads, misaligned = np.zeros(len(chains.rows), np.int64), set[int]()
    roots = np.searchsorted(chains.rows, chains.rows, side="right") - 1
    for example in np.flatnonzero(chains.skipped).tolist():
        first, last = segments.offsets[roots[example] : roots[example] + 2].tolist()
        count = int(np.searchsorted(segments.ends[first:last], chains.skipped[example], side="right"))
        if not count or segments.ends[first + count - 1] != chains.skipped[example]:
            misaligned.add(int(chains.rows[example]))
        heads[example] = count
    return heads, misaligned
