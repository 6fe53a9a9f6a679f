"""A batch: its tensors, the rows they come from, and token counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from penstock.arrays import Int64
from penstock.notebook import html
from penstock.store.dataset import RowLocation
from penstock.view.view import Served


class Counts(NamedTuple):
    """Token counts of a batch. `trained` counts tokens predicted with a loss, so never the first of a sequence."""

    sequences: int
    tokens: int
    trained: int
    padding: int
    filler_rows: int  # rows without loss that complete a batch


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One rank's micro-batch of a global step: number `micro` of the step's `micros`."""

    step: int
    epoch: int
    micro: int
    micros: int
    tensors: Mapping[str, Any]  # name -> numpy array or torch tensor; max_length_q and _k are plain integers
    items: Int64  # numbers of the sequences (or pairs) in the view or mixture
    places: Int64 = field(repr=False)  # source and row of each
    counts: Counts
    step_weight: float  # total loss weight of the step over all micro-batches and ranks; the mean loss divides by it

    served: Served | None = field(default=None, repr=False)  # for notebooks, which show text; never pickled

    @property
    def rows(self) -> tuple[RowLocation, ...]:
        """The source and row of each sequence (or pair), counted from 0."""
        return tuple(RowLocation(source, row) for source, row in self.places.tolist())

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

    def __reduce__(self) -> tuple[Callable[..., Batch], tuple[Any, ...]]:
        kept = (self.step, self.epoch, self.micro, self.micros, self.tensors, self.items, self.places, self.counts)
        return Batch, (*kept, self.step_weight)

    def _repr_html_(self) -> str | None:
        return html(self)

    def holding(self, tensors: Mapping[str, Any]) -> Batch:
        """The same batch with its tensors in another form."""
        return replace(self, tensors=tensors)
