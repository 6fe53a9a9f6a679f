"""A batch: its tensors, the rows they come from, and token counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from penstock.arrays import Int64
from penstock.notebook import html
from penstock.store.dataset import MemberRow, RowLocation
from penstock.view.view import Served


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
