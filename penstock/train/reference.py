"""DPO's reference: log-probabilities computed once and kept beside the dataset, or a model that is asked at every step.

Cached values are named by (weights of the model, view of the dataset, numbers, attention), so they are found again
by every run that would compute the same, and never by another. Each part of a mixture has its own: other shares of the
same parts cost nothing. Computing them is one forward pass over the data, shared by all ranks.
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
from penstock.train.objective import Policy, pair_log_probs
from penstock.view.runs import Float32
from penstock.view.view import View

if TYPE_CHECKING:
    from accelerate import Accelerator

log = logging.getLogger("penstock")
VERSION = b"reference 1"  # raise it when the same model and view give other values


class AdapterReference:
    """The model under training with its adapters off."""

    def __init__(self, policy: Policy, adapted: Any) -> None:
        self._policy, self._adapted, self.plain = policy, adapted, policy.plain

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """Adapters off, dropout off."""
        model = self._policy.model
        training = model.training
        model.eval()
        try:
            with self._adapted.disable_adapter():
                yield model
        finally:
            model.train(training)


class FrozenReference:
    """A copy of the model as it was at the start, or the model itself as long as it is that."""

    def __init__(self, model: nn.Module, plain: Any) -> None:
        self._model, self.plain = model, plain

    @classmethod
    def copied(cls, model: Any, device: torch.device) -> FrozenReference:
        """A copy that training does not change."""
        frozen = copy.deepcopy(model).to(device).requires_grad_(False)
        return cls(frozen, frozen)

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """Dropout off."""
        training = self._model.training
        self._model.eval()
        try:
            yield self._model
        finally:
            self._model.train(training)


class LiveReferences:
    """Log-probabilities of a batch, by the reference model, now."""

    def __init__(self, policy: Policy, reference: AdapterReference | FrozenReference) -> None:
        self._policy, self._reference = policy, reference

    def __call__(self, batch: Batch) -> Tensor:
        """[2n]: all chosen, then all rejected."""
        with torch.no_grad(), self._reference.active() as model:
            return pair_log_probs(self._policy, batch, model=model)


class CachedReferences:
    """Log-probabilities of a batch, looked up."""

    def __init__(self, values: Float32, device: torch.device) -> None:
        """`values`: [items, 2], chosen and rejected."""
        self._values, self._device = values, device

    def __call__(self, batch: Batch) -> Tensor:
        """[2n]: all chosen, then all rejected."""
        found = self._values[batch.items].T.reshape(-1)
        return torch.from_numpy(found.copy()).to(self._device)


class ReferenceStore:
    """Finds cached log-probabilities, or computes and keeps them."""

    def __init__(self, accelerator: Accelerator, references: LiveReferences, name: str, batch_size: int) -> None:
        """`name` is all that decides the values besides the view; `batch_size` rows are computed at a time."""
        self._accelerator, self._references = accelerator, references
        self._name, self._batch_size = name, batch_size
        self.computed = 0  # pairs

    def values(self, served: Served) -> Float32:
        """[items, 2] for all items of a view or mixture."""
        return np.concatenate([self._of_view(view) for view in views_of(served)])

    def _of_view(self, view: View) -> Float32:
        name = digest(VERSION, self._name.encode(), view.digest.encode())
        found = _read(view, name)
        here = torch.tensor([float(found is not None)], device=self._accelerator.device)
        everywhere = int(self._accelerator.reduce(here, "sum").item()) == self._accelerator.num_processes
        if found is not None and everywhere:
            return found
        values = self._computed(view)
        if self._accelerator.is_main_process:
            _keep(view, name, values)
        return values

    def _computed(self, view: View) -> Float32:
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


def _read(view: View, name: str) -> Float32 | None:
    dataset = view.dataset
    if not isinstance(dataset, StoredDataset):
        return None
    try:
        found = np.load(dataset.path / "reference" / f"{name}.npy", allow_pickle=False)
    except (OSError, ValueError, EOFError):  # not there, or damaged: it is computed again
        return None
    return found if found.shape == (len(view), 2) and found.dtype == np.float32 else None


def _keep(view: View, name: str, values: Float32) -> None:
    dataset = view.dataset
    if not isinstance(dataset, StoredDataset):
        return
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    try:
        path = dataset.path / "reference" / f"{name}.npy"
        dataset.cache.tree.write(path, buffer.getvalue(), "reference")
    except StoreError as error:
        log.warning("reference log-probabilities are not kept: %s", error)
