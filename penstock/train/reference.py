"""DPO's reference log-probabilities: computed once and stored with the dataset, or computed live at every step.

Cached values are keyed by (model weights, view, precision, attention), so exactly those runs that would compute the
same values reuse them. Each part of a mixture is cached separately: changing its share costs nothing. A run scores the
pairs that it visits and that no earlier run has scored, in forward passes shared by all ranks; the others stay NaN.

Which pairs share a forward pass changes the rounding of their values. So the run keeps the values that it uses in
`OUTPUT/reference/` too, and a resumed run takes them from there, whatever happened to the dataset's in the meantime.
"""

from __future__ import annotations

import copy
import io
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from penstock.arrays import Int64
from penstock.digests import digest
from penstock.errors import StoreError
from penstock.load.assemble import pad_token
from penstock.load.collate import Batch, Padding, pairs
from penstock.load.gather import Gatherer
from penstock.load.policy import Float32
from penstock.load.prefetch import Prefetcher
from penstock.load.torch_datasets import TensorConverter
from penstock.load.view import Served, View
from penstock.train.metrics import write_whole
from penstock.train.objective import Policy, pair_log_probs

if TYPE_CHECKING:
    from accelerate import Accelerator

log = logging.getLogger("penstock")
VERSION = b"reference 1"  # bump when the same model and view give different values


class Scored(NamedTuple):
    """Progress of scoring with the reference model."""

    pairs: int  # scored so far, by all ranks
    total: int
    seconds: float


OnScored = Callable[[Scored], None]


class AdapterReference:
    """The model being trained, with its adapters disabled."""

    def __init__(self, policy: Policy, adapted: Any) -> None:
        self._policy, self._adapted, self.plain = policy, adapted, policy.plain

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """Disables adapters and dropout."""
        model = self._policy.model
        training = model.training
        model.eval()
        try:
            with self._adapted.disable_adapter():
                yield model
        finally:
            model.train(training)


class FrozenReference:
    """A frozen copy of the initial model, or the model itself before training starts."""

    def __init__(self, model: nn.Module, plain: Any) -> None:
        self._model, self.plain = model, plain

    @classmethod
    def copied(cls, model: Any, device: torch.device) -> FrozenReference:
        """Makes a frozen copy."""
        frozen = copy.deepcopy(model).to(device).requires_grad_(False)
        return cls(frozen, frozen)

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """Disables dropout."""
        training = self._model.training
        self._model.eval()
        try:
            yield self._model
        finally:
            self._model.train(training)


class LiveReferences:
    """Computes the log-probabilities of a batch with the reference model."""

    def __init__(self, policy: Policy, reference: AdapterReference | FrozenReference) -> None:
        self._policy, self._reference = policy, reference

    def __call__(self, batch: Batch) -> Tensor:
        """[2n]: all chosen, then all rejected."""
        with torch.no_grad(), self._reference.active() as model:
            return pair_log_probs(self._policy, batch, model=model)


class CachedReferences:
    """Looks up the log-probabilities of a batch."""

    def __init__(self, values: Float32, device: torch.device) -> None:
        """`values`: [items, 2], chosen and rejected."""
        self._values, self._device = values, device

    def __call__(self, batch: Batch) -> Tensor:
        """[2n]: all chosen, then all rejected."""
        found = self._values[batch.items].T.reshape(-1)
        return torch.from_numpy(found.copy()).to(self._device)


class ReferenceStore:
    """Loads cached log-probabilities; computes and stores those that are missing."""

    def __init__(
        self,
        accelerator: Accelerator,
        references: LiveReferences,
        name: str,
        batch_size: int,
        output: Path,
        on_scored: OnScored = lambda _: None,
    ) -> None:
        """`name`: all that determines the values, except the view; `batch_size`: pairs per forward pass."""
        self._accelerator, self._references = accelerator, references
        self._name, self._batch_size = name, batch_size
        self._folder, self._on_scored = output / "reference", on_scored

    def values(self, served: Served, items: Int64) -> Float32:
        """The values [all items, 2] of a view or mixture: known ones and those of `items`, NaN elsewhere."""
        parts = [self._part(number, view) for number, view in enumerate(served.views)]
        values = np.full((len(served), 2), np.nan, np.float32)
        if self._accelerator.is_main_process:
            values = np.concatenate([part.known() for part in parts])
        values = self._broadcast(values)
        missing = items[np.isnan(values[items]).any(axis=1)]
        if len(missing):
            values[missing] = self._scores(served, missing)
        if self._accelerator.is_main_process:
            ends = np.cumsum([len(part.view) for part in parts])[:-1]
            for part, own in zip(parts, np.split(values, ends), strict=True):
                part.keep(own)
        return values

    def _part(self, number: int, view: View) -> _Part:
        name = digest(VERSION, self._name.encode(), view.digest.encode())
        return _Part(view, self._folder / f"{number}-{name}.npy", f"{name}.npy")

    def _scores(self, served: Served, items: Int64) -> Float32:
        """The values [n, 2] of these items. Pairs of similar length share a forward pass; the longest come first."""
        ranks, rank, size = self._accelerator.num_processes, self._accelerator.process_index, self._batch_size
        order = np.argsort(-served.lengths[items].max(axis=1), kind="stable")
        own, passes = order[rank::ranks], -(-len(items) // (ranks * size))
        batches = _Batches(served, [items[own[k * size : (k + 1) * size]] for k in range(passes)], size)
        values = torch.zeros((len(items), 2), dtype=torch.float32)
        started = time.monotonic()
        with Prefetcher(batches, 0, passes) as prefetched:
            for k in range(passes):
                self._on_scored(Scored(min(k * ranks * size, len(items)), len(items), time.monotonic() - started))
                found = self._references(prefetched.get(k)).float().cpu().reshape(2, -1)
                values[torch.from_numpy(own[k * size : (k + 1) * size])] = found.T
        self._on_scored(Scored(len(items), len(items), time.monotonic() - started))
        total: Float32 = self._accelerator.reduce(values.to(self._accelerator.device), "sum").cpu().numpy()
        return total

    def _broadcast(self, values: Float32) -> Float32:
        """The first rank's values, on all ranks."""
        if self._accelerator.num_processes == 1:
            return values
        from accelerate.utils import broadcast

        sent: Float32 = broadcast(torch.from_numpy(values).to(self._accelerator.device)).cpu().numpy()
        return sent


class _Batches:
    """Batches of given pairs, filled up to a common size, so that every rank runs the same number of passes."""

    def __init__(self, served: Served, chosen: list[Int64], size: int) -> None:
        self._served, self._chosen, self._size = served, chosen, size
        self._gather, self._padding = Gatherer(served), Padding(pad_token(served))
        self._convert = TensorConverter(pin_memory=False, device=None)

    def __call__(self, number: int) -> Batch:
        items = self._chosen[number]
        if self._gather.download_bytes:
            for part in self._gather.shards(items):
                part.dataset.shards.fetch(part.shards)
        found = self._gather(items)
        arrays, counts = pairs(found, 0 if len(items) else 1, self._padding)
        return Batch(number, 0, 0, 1, self._convert(arrays), items, found.places, counts, float(len(items)))


class _Part(NamedTuple):
    """The values of one view on disk: those that this run uses, and those that runs share beside the dataset."""

    view: View
    own: Path
    name: str

    @property
    def shared(self) -> Path:
        """The file beside the dataset."""
        dataset = self.view.dataset
        return dataset.path / "reference" / self.name

    def known(self) -> Float32:
        """The values this run used before, else those of the dataset; NaN where there are none."""
        own = _read(self.own, len(self.view))
        return np.where(np.isnan(own), _read(self.shared, len(self.view)), own)

    def keep(self, values: Float32) -> None:
        """Stores values with the run, and with the dataset those that it lacks."""
        try:
            if _adds(values, _read(self.own, len(self.view))):
                self.own.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self.own, _bytes(values))
            shared, before = self.shared, _read(self.shared, len(self.view))
            if _adds(values, before):
                merged = np.where(np.isnan(before), values, before)
                files = self.view.dataset.cache.files
                files.write(files.relative(shared), _bytes(merged), "reference")
        except (StoreError, OSError) as error:
            log.warning("reference log-probabilities could not be stored: %s", error)


def _read(path: Path, pairs: int) -> Float32:
    """Stored values; NaN if they are missing or damaged."""
    nothing: Float32 = np.full((pairs, 2), np.nan, np.float32)
    try:
        found: Float32 = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return nothing
    return found if found.shape == nothing.shape and found.dtype == nothing.dtype else nothing


def _adds(values: Float32, before: Float32) -> bool:
    """Whether there are values where there were none before."""
    return bool((np.isnan(before) & ~np.isnan(values)).any())


def _bytes(values: Float32) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    return buffer.getvalue()
