"""What a loader serves: one batch, with its tensors, where they come from, and what is in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from penstock.arrays import Int64
from penstock.notebook import html
from penstock.store.dataset import RowLocation
from penstock.view.view import Served


class Counts(NamedTuple):
    """What a batch holds: `trained` are the tokens that are predicted with a loss, so a sequence's first never is."""

    sequences: int
    tokens: int
    trained: int
    padding: int
    filler_rows: int  # rows without loss, that only fill up


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One rank's micro-batch of a global step. `micro` counts the micro-batches of the step, `micros` is how many."""

    step: int
    epoch: int
    micro: int
    micros: int
    tensors: Mapping[str, Any]  # name -> numpy array or torch tensor; max_length_q and _k are plain integers
    items: Int64  # numbers of the sequences (or pairs) in the view or mixture
    places: Int64 = field(repr=False)  # source and row of each
    counts: Counts
    step_weight: float  # of all that the step trains, over its micro-batches and ranks: the mean loss divides by it

    served: Served | None = field(default=None, repr=False)  # for notebooks, which show text; never pickled

    @property
    def rows(self) -> tuple[RowLocation, ...]:
        """Where the sequences (or pairs) come from: source and row, from 0."""
        return tuple(RowLocation(source, row) for source, row in self.places.tolist())

    @property
    def inputs(self) -> dict[str, Any]:
        """The tensors that a model's forward takes: all but loss weights, labels of answers, and how trees branch."""
        beside = ("loss_weights", "desirable", "branches", "parents", "starts")
        return {name: tensor for name, tensor in self.tensors.items() if name not in beside}

    @property
    def ends_step(self) -> bool:
        """Whether the optimizer steps after this batch."""
        return self.micro == self.micros - 1

    def __reduce__(self) -> tuple[Callable[..., Batch], tuple[Any, ...]]:
        kept = (self.step, self.epoch, self.micro, self.micros, self.tensors, self.items, self.places, self.counts)
        return Batch, (*kept, self.step_weight)

    def _repr_html_(self) -> str | None:
        return html(self)

    def holding(self, tensors: Mapping[str, Any]) -> Batch:
        """The same batch with its tensors in another form."""
        return replace(self, tensors=tensors)
