"""From rendered turns to segments: the examples of a batch, and what each of them shares with its row's root."""

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
    """Examples to encode: the texts behind what they share with the last example of their row."""

    texts: list[bytes]
    segments: Segments
    rows: Int64  # the conversation of each
    order: Int64  # its number among those of its row
    heads: Int64  # how many segments of the root it begins with
    seams: Int64  # where its text is encoded in two parts; 0: nowhere
    errors: dict[int, RowError]  # by conversation


def split_chains(arranger: Arranger, splitter: Splitter, rendered: Rendered) -> ChainSegments:
    """Arrange the turns of a batch into examples, and cut these into segments."""
    chains = arranger.arrange(rendered)
    segments, errors = splitter.split_chains(chains)
    heads, torn = _heads(chains, segments)
    if torn:
        chains = arranger.arrange(rendered, frozenset(torn))
        segments, errors = splitter.split_chains(chains)
        heads, torn = _heads(chains, segments)
        assert not torn, "chains that share nothing are torn"
    order = np.arange(len(chains.rows)) - np.searchsorted(chains.rows, chains.rows)
    return ChainSegments(chains.rendered.texts, segments, chains.rows, order, heads, chains.seams, errors)


def _heads(chains: Chains, segments: Segments) -> tuple[Int64, set[int]]:
    """How many segments of its root each example begins with; and the rows where none of them ends at the cut."""
    heads, torn = np.zeros(len(chains.rows), np.int64), set[int]()
    roots = np.searchsorted(chains.rows, chains.rows, side="right") - 1
    for example in np.flatnonzero(chains.skipped).tolist():
        first, last = segments.offsets[roots[example] : roots[example] + 2].tolist()
        count = int(np.searchsorted(segments.ends[first:last], chains.skipped[example], side="right"))
        if not count or segments.ends[first + count - 1] != chains.skipped[example]:
            torn.add(int(chains.rows[example]))
        heads[example] = count
    return heads, torn
