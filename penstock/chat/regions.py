"""The records between rendering, splitting into parts, and encoding. Positions are UTF-8 byte offsets.

`Regions` leaves the template engine: the texts of a batch and who printed which bytes.
`Segments` leaves the splitter: each text cut into runs of one message, role and part.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from penstock.errors import RowError

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Regions:
    """The rendered texts of a batch, joined without separators, with pieces and generation spans.

    A piece is a run of bytes that one message printed; pieces are sorted, never overlap, never cross texts,
    and a message may have several. Spans are `{% generation %}` blocks. All offsets are absolute in `data`.
    A row in `errors` has an empty text; a row whose regions are not certain has `known` False and no pieces.
    """

    data: bytes
    text_ends: Int64  # one per row
    known: Bool  # one per row
    piece_rows: Int32
    piece_messages: Int32  # number of the message in its conversation
    piece_starts: Int64
    piece_ends: Int64
    span_rows: Int32
    span_starts: Int64
    span_ends: Int64
    errors: dict[int, RowError] = field(default_factory=dict)
    reference: Counter[str] = field(default_factory=Counter)  # why the reference engine served rows: reason -> rows

    @property
    def texts(self) -> list[bytes]:
        """The text of each row."""
        return [self.data[start:end] for start, end in pairwise([0, *self.text_ends.tolist()])]


@dataclass(frozen=True, slots=True)
class Segments:
    """Every text cut into consecutive runs; row r owns entries offsets[r]:offsets[r+1].

    `ends` are relative to the row's text; the last one of a row is the text's length (a row with an empty
    text has no entries). A row with unknown regions has one entry (glue). `inclusive`: a token that crosses
    this segment's end belongs to this segment rather than to the next one.
    """

    offsets: Int64
    ends: Int64
    roles: UInt8
    parts: UInt8
    messages: Int32  # -1 for glue
    inclusive: Bool
    known: Bool  # one per row
    notes: Counter[str] = field(default_factory=Counter)  # warnings for the ledger: note -> rows

    def followed_by(self, more: Segments) -> Segments:
        """The rows of both, one after the other."""
        return Segments(
            offsets=np.concatenate((self.offsets, more.offsets[1:] + self.offsets[-1])),
            ends=np.concatenate((self.ends, more.ends)),
            roles=np.concatenate((self.roles, more.roles)),
            parts=np.concatenate((self.parts, more.parts)),
            messages=np.concatenate((self.messages, more.messages)),
            inclusive=np.concatenate((self.inclusive, more.inclusive)),
            known=np.concatenate((self.known, more.known)),
            notes=self.notes + more.notes,
        )

    def taken(self, order: Int64) -> Segments:
        """The rows of these numbers, in this order."""
        places, offsets = gathered(self.offsets, order)
        return replace(self.picked(places, offsets), known=self.known[order])

    def picked(self, places: Int64, offsets: Int64) -> Segments:
        """The segments at these places, of which a row owns those between its offsets."""
        return replace(
            self,
            offsets=offsets,
            ends=self.ends[places],
            roles=self.roles[places],
            parts=self.parts[places],
            messages=self.messages[places],
            inclusive=self.inclusive[places],
        )


def gathered(offsets: Int64, order: Int64) -> tuple[Int64, Int64]:
    """Positions of the elements of some lists in a flat array, and the offsets of the gathered lists."""
    lengths = np.diff(offsets)[order]
    out = np.concatenate(([0], np.cumsum(lengths)))
    return np.arange(out[-1]) + np.repeat(offsets[:-1][order] - out[:-1], lengths), out
