"""Collates gathered sequences into the arrays of a batch. All functions are pure and vectorised.

`padded`   input_ids, attention_mask, labels int64 [n, T]; loss_weights float32 [n, T]; labelled data (KTO) adds
           desirable int64 [n], 1 for a good answer.
`packed`   for variable-length attention: input_ids, labels, position_ids int64 [1, T]; cu_seq_lens_q/k int32 [n+1];
           max_length_q/k int; seq_idx int32 [1, T]; loss_weights float32 [1, T]. No attention mask. The first label of
           each sequence is -100, so that no sequence predicts another. Padding forms one more segment at the end
           (at most a row's capacity long; whole rows of padding are one segment each).
`pairs`    like padded, [2n, T]: all chosen, then all rejected; completion_mask int64, 1 after the common prompt.
`tree`     the chains of a row as one sequence: see `tree.py`.

To add a layout, write its function here, name it in `Collate` (`settings.py`) and call it from `assemble.py`.

A filler row is a single padding token with no loss. It is attended to, because attention over nothing is NaN.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.arrays import Bool, Int32, Int64
from penstock.feed.batch import Counts
from penstock.view.example import IGNORED
from penstock.view.gather import Gathered
from penstock.view.runs import Float32

Arrays = dict[str, npt.NDArray[np.int64] | npt.NDArray[np.int32] | npt.NDArray[np.float32] | int]

Number = TypeVar("Number", np.int64, np.float32)


class Side(StrEnum):
    """Where padding goes."""

    RIGHT = "right"
    LEFT = "left"


class Padding(NamedTuple):
    """The padding token, the side it goes on, and the multiple that lengths are padded to."""

    token: int = 0
    side: Side = Side.RIGHT
    multiple: int = 1
    total: int = 0  # packed: minimum number of tokens
    segment: int | None = None  # packed: maximum length of a segment of padding


def padded(found: Gathered, fillers: int, padding: Padding) -> tuple[Arrays, Counts]:
    """One row per sequence, followed by `fillers` filler rows."""
    filled = _filled(found, fillers, padding.token, groups=1)
    inside = _inside(filled.lengths, padding)
    arrays = _padded_arrays(filled, inside, padding)
    if found.desirable is not None:
        arrays["desirable"] = np.append(found.desirable, np.ones(fillers, np.int64))
    return arrays, _counts(found, inside.size, fillers)


def pairs(found: Gathered, fillers: int, padding: Padding) -> tuple[Arrays, Counts]:
    """Two rows per pair: all chosen sides and `fillers` filler rows, then the same for the rejected sides."""
    filled = _filled(found, fillers, padding.token, groups=2)
    inside = _inside(filled.lengths, padding)
    arrays = _padded_arrays(filled, inside, padding)
    prompts = np.tile(np.append(found.prompts, np.ones(fillers, np.int64)), 2)
    behind = np.arange(inside.shape[1]) >= (inside.argmax(axis=1) + prompts)[:, None]  # left padding moves the prompt
    arrays["completion_mask"] = (inside & behind).astype(np.int64)
    return arrays, _counts(found, inside.size, fillers)


def _filled(found: Gathered, fillers: int, token: int, groups: int) -> Gathered:
    """Append filler rows (one token, no loss) to each group of sequences."""
    if not fillers:
        return found
    cuts = np.cumsum(found.lengths.reshape(groups, -1).sum(axis=1))[:-1]
    extra = np.full(fillers, token, np.int64)
    return found._replace(
        ids=_after_each(np.split(found.ids, cuts), extra),
        weights=_after_each(np.split(found.weights, cuts), np.zeros(fillers, np.float32)),
        lengths=_after_each(np.split(found.lengths, groups), np.ones(fillers, np.int64)),
    )


def _after_each(parts: list[npt.NDArray[Number]], extra: npt.NDArray[Number]) -> npt.NDArray[Number]:
    return np.concatenate([piece for part in parts for piece in (part, extra)])


def _padded_arrays(found: Gathered, inside: Bool, padding: Padding) -> Arrays:
    return {
        "input_ids": _scatter(found.ids, inside, padding.token),
        "attention_mask": inside.astype(np.int64),
        "labels": _scatter(_labels(found.ids, found.weights), inside, IGNORED),
        "loss_weights": _scatter(found.weights, inside, 0),
    }


def packed(found: Gathered, align: int, fillers: int, padding: Padding) -> tuple[Arrays, Counts]:
    """All sequences in one row, each padded to a multiple of `align`; the rest, if any, is one segment of padding."""
    sizes = -(-found.lengths // align) * align
    total = int(sizes.sum())
    width = max(total, padding.total, 1)
    width += -width % padding.multiple
    if width > total:
        sizes = np.append(sizes, _tail(width - total, padding.segment))
    ends = np.cumsum(sizes)
    starts = ends - sizes
    labels, weights = _labels(found.ids, found.weights), found.weights.copy()
    first = np.cumsum(found.lengths) - found.lengths
    labels[first], weights[first] = IGNORED, 0
    owner = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    positions = np.arange(width) - np.repeat(starts, sizes)
    ids = found.ids
    if len(ids) < width:  # alignment, or a tail
        lengths = np.zeros_like(sizes)  # the tail holds no token
        lengths[: len(found.lengths)] = found.lengths
        real = positions < np.repeat(lengths, sizes)
        ids, labels = _scatter(ids, real, padding.token), _scatter(labels, real, IGNORED)
        weights = _scatter(weights, real, 0)
    bounds: Int32 = np.concatenate(([0], ends)).astype(np.int32)
    longest = int(sizes.max())
    arrays: Arrays = {
        "input_ids": ids[None],
        "labels": labels[None],
        "position_ids": positions[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": owner[None],
        "loss_weights": weights[None],
    }
    return arrays, _counts(found, width, fillers)


def _tail(size: int, segment: int | None) -> list[int]:
    """Sizes of the padding segments: one segment, unless it would exceed the positions a model supports."""
    whole, rest = divmod(size, segment or size)
    return [segment or size] * whole + [rest] * (rest > 0)


def _labels(ids: Int64, weights: Float32) -> Int64:
    return np.where(weights > 0, ids, IGNORED)


def _inside(lengths: Int64, padding: Padding) -> Bool:
    """Which cells of the padded rows hold tokens."""
    width = int(lengths.max(initial=1))
    width += -width % padding.multiple
    columns = np.arange(width)
    match padding.side:
        case Side.RIGHT:
            return columns < lengths[:, None]
        case Side.LEFT:
            return columns >= width - lengths[:, None]


def _scatter(flat: npt.NDArray[Number], inside: Bool, empty: int) -> npt.NDArray[Number]:
    """Scatter flat values into the cells that hold tokens, with `empty` everywhere else."""
    out = np.full(inside.shape, empty, flat.dtype)
    out[inside] = flat
    return out


def _counts(found: Gathered, cells: int, fillers: int) -> Counts:
    first = np.cumsum(found.lengths) - found.lengths
    trained = int(np.count_nonzero(found.weights)) - int(np.count_nonzero(found.weights[first]))
    return Counts(len(found.lengths), len(found.ids), trained, cells - len(found.ids), fillers)
