"""DPO's reference log-probabilities: computed once and stored with the dataset, or computed live at every step.

Cached values are keyed by (model weights, view, precision, attention), so exactly those runs that would compute the
same values reuse them. Each part of a mixture is cached separately: changing its share costs nothing. Computing them
takes one forward pass over the data, shared by all ranks.
"""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.errors import StoreError
from penstock.feed.batch import Batch
from penstock.feed.loader import Loader
from penstock.store.dataset import StoredDataset
from penstock.store.files import digest
from penstock.train.data import Served, views_of
from penstock.train.objectives.objective import Policy, pair_log_probs
from penstock.view.runs import Float32
from penstock.view.view import BaseView

if TYPE_CHECKING:
    from accelerate import Accelerator

log = logging.getLogger("penstock")
VERSION = b"reference 1"  # bump when the same model and view give different values


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
    """Loads cached log-probabilities, or computes and stores them."""

    def __init__(self, accelerator: Accelerator, references: LiveReferences, name: str, batch_size: int) -> None:
        """`name` identifies everything but the view that determines the values; `batch_size`: rows per forward pass."""
        self._accelerator, self._references = accelerator, references
        self._name, self._batch_size = name, batch_size
        self.computed = 0  # pairs

    def values(self, served: Served) -> Float32:
        """The values [items, 2] of a view or mixture."""
        return np.concatenate([self._of_view(view) for view in views_of(served)])

    def _of_view(self, view: BaseView) -> Float32:
        name = digest(VERSION, self._name.encode(), view.digest.encode())
        found = _read(view, name)
        hit = torch.tensor([float(found is not None)], device=self._accelerator.device)
        all_hit = int(self._accelerator.reduce(hit, "sum").item()) == self._accelerator.num_processes
        if found is not None and all_hit:
            return found
        values = self._compute(view)
        if self._accelerator.is_main_process:
            _store(view, name, values)
        return values

    def _compute(self, view: BaseView) -> Float32:
        accelerator = self._accelerator
        values = torch.zeros((len(view), 2), dtype=torch.float32)
        loader = Loader(
            view,
            batch_size=self._batch_size * accelerator.num_processes,
            shuffle=False,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            framework="torch",
        )
        with loader:
            for batch in loader:
                found = self._references(batch).float().cpu().reshape(2, -1)
                values[torch.from_numpy(batch.items)] = found.T
        self.computed += len(view)
        total: Float32 = accelerator.reduce(values.to(accelerator.device), "sum").cpu().numpy()
        return total


def _read(view: BaseView, name: str) -> Float32 | None:
    dataset = view.dataset
    if not isinstance(dataset, StoredDataset):
        return None
    try:
        found = np.load(dataset.path / "reference" / f"{name}.npy", allow_pickle=False)
    except (OSError, ValueError, EOFError):  # missing or damaged: recompute
        return None
    return found if found.shape == (len(view), 2) and found.dtype == np.float32 else None


def _store(view: BaseView, name: str, values: Float32) -> None:
    dataset = view.dataset
    if not isinstance(dataset, StoredDataset):
        return
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    try:
        path = dataset.path / "reference" / f"{name}.npy"
        dataset.cache.tree.write(path, buffer.getvalue(), "reference")
    except StoreError as error:
        log.warning("reference log-probabilities could not be cached: %s", error)
