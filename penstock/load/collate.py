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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.arrays import Bool, Int32, Int64
from penstock.load.example import IGNORED
from penstock.load.gather import Gathered
from penstock.load.options import PaddingSide
from penstock.load.policy import Float32
from penstock.load.view import Served
from penstock.store.dataset import MemberRow, RowLocation
from penstock.surface import html

# ---- batch -----------------------------------------------------------------------------------------------------------
#
# A batch: its tensors, the rows they come from, and token counts.


class Counts(NamedTuple):
    """Token counts of a batch. `trained` counts tokens predicted with a loss, so never the first of a sequence."""

    sequences: int
    tokens: int
    trained: int
    padding: int
    filler_rows: int  # rows without loss that complete a batch


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Batch:
    """One rank's micro-batch of a global step: number `micro` of the step's `micros`."""

    step: int
    epoch: int
    micro: int
    micros: int
    tensors: Mapping[str, Any]  # name -> numpy array or torch tensor; max_length_q and _k are plain integers
    items: Int64  # numbers of the sequences (or pairs) in the view or mixture
    places: Int64  # source and row of each
    counts: Counts
    step_weight: float  # total loss weight of the step over all micro-batches and ranks; the mean loss divides by it
    members: tuple[str, ...] = ()  # in a mixture, the member that each comes from
    served: Served | None = None  # for notebooks, which show text; never pickled

    @property
    def rows(self) -> tuple[RowLocation, ...]:
        """The source and row of each sequence (or pair), counted from 0, and its member in a mixture."""
        located = tuple(RowLocation(source, row) for source, row in self.places.tolist())
        if not self.members:
            return located
        return tuple(MemberRow.of(row, name) for row, name in zip(located, self.members, strict=True))

    @property
    def inputs(self) -> dict[str, Any]:
        """The arguments of a model's `forward`: all tensors but loss weights, KTO labels and tree structure.

        Packed batches add `use_cache=False`: with a cache, models of transformers don't isolate packed sequences.
        """
        beside = ("loss_weights", "desirable", "branches", "parents", "starts")
        found = {name: tensor for name, tensor in self.tensors.items() if name not in beside}
        return {**found, "use_cache": False} if "cu_seq_lens_q" in found else found

    @property
    def ends_step(self) -> bool:
        """Whether the optimizer steps after this batch."""
        return self.micro == self.micros - 1

    def __repr__(self) -> str:
        shapes = {name: getattr(tensor, "shape", tensor) for name, tensor in self.tensors.items()}
        tensors = ", ".join(f"{name} {tuple(s) if hasattr(s, '__iter__') else s}" for name, s in shapes.items())
        micro = f", micro={self.micro} of {self.micros}" if self.micros > 1 else ""
        return f"Batch(step={self.step}, epoch={self.epoch}{micro}, {self.counts}, tensors: {tensors})"

    def __reduce__(self) -> tuple[Callable[..., Batch], tuple[Any, ...]]:
        kept = (self.step, self.epoch, self.micro, self.micros, self.tensors, self.items, self.places, self.counts)
        return Batch, (*kept, self.step_weight, self.members)

    def _repr_html_(self) -> str | None:
        return html(self)

    def holding(self, tensors: Mapping[str, Any]) -> Batch:
        """The same batch with its tensors in another form."""
        return replace(self, tensors=tensors)


# ---- collate ---------------------------------------------------------------------------------------------------------


Arrays = dict[str, npt.NDArray[np.int64] | npt.NDArray[np.int32] | npt.NDArray[np.float32] | int]

Number = TypeVar("Number", np.int64, np.float32)


class Padding(NamedTuple):
    """The padding token, the side it goes on, and the multiple that lengths are padded to."""

    token: int = 0
    side: PaddingSide = PaddingSide.RIGHT
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
        case PaddingSide.RIGHT:
            return columns < lengths[:, None]
        case PaddingSide.LEFT:
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
