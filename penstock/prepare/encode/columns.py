"""The columns of one shard as numpy arrays: the record that `view`, `pack` and `look` work on.

Example i has the tokens ids[id_offsets[i]:id_offsets[i+1]] and the segments [segment_offsets[i]:segment_offsets[i+1]].
`segment_ends` count tokens from the start of the example; the last one of an example equals its length.
A row whose regions are unknown has a single segment: role NONE, part GLUE, message -1.
Preference data has `sides` (0 chosen, 1 rejected); the two sides of a pair are adjacent, chosen first.
Labelled answers (KTO) have `desirable` (1 for a good one).

Rows of which one example is not enough (`--turns faithful`) have several, the root last. The others begin with the
first `prefixes` tokens of the root; only what follows is stored, tokens and segments. Their `segment_ends` count all
tokens, those of the prefix included. Read such shards through `store.chains`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Columns(NamedTuple):
    """Read-only views on a shard's buffers, or arrays in memory."""

    ids: npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
    id_offsets: npt.NDArray[np.int64] | npt.NDArray[np.int32]
    segment_offsets: npt.NDArray[np.int64] | npt.NDArray[np.int32]
    segment_ends: npt.NDArray[np.uint32]
    segment_roles: npt.NDArray[np.uint8]
    segment_parts: npt.NDArray[np.uint8]
    segment_messages: npt.NDArray[np.int32]
    segment_weights: npt.NDArray[np.float32] | None  # NaN: the row gave no weight for this message
    rows: npt.NDArray[np.uint32]  # row number inside the slice
    row_hashes: npt.NDArray[np.uint64]
    sides: npt.NDArray[np.uint8] | None
    prefixes: npt.NDArray[np.uint32] | None = None  # tokens of the row's last example that an example begins with
    desirable: npt.NDArray[np.uint8] | None = None

    @property
    def examples(self) -> int:
        """Number of examples in the shard; a pair counts as two."""
        return len(self.rows)

    @property
    def tokens(self) -> int:
        """Tokens of all examples, shared ones counted each time."""
        return int(self.id_offsets[-1]) + (0 if self.prefixes is None else int(self.prefixes.sum(dtype=np.int64)))
