"""Losses by source and by role: which group each term of a batch's loss belongs to.

Sources are the parts of a mixture, or the files of one dataset; a single one makes no group. Roles make groups where a
loss policy may train more than one. Terms stand in the order of the batch: of a token loss they are its trained tokens,
sequence by sequence, of an item loss its items.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from penstock.arrays import Int64
from penstock.chat.conversation import Role
from penstock.feed.batch import Batch
from penstock.train.data import Served, views_of
from penstock.view.gather import Gatherer
from penstock.view.mixture import BaseMixture
from penstock.view.settings import LossPolicy

if TYPE_CHECKING:
    from penstock.train.objectives.objective import Grouped

ROLES = {role: f"loss_by_role/{role.name.lower()}" for role in Role if role is not Role.NONE}
ONE_ROLE = (
    LossPolicy.ALL_ASSISTANT_MESSAGES,
    LossPolicy.LAST_ASSISTANT_MESSAGE,
    LossPolicy.LAST_ASSISTANT_TURN,
)


class Groups:
    """The groups of a view or mixture."""

    def __init__(self, served: Served) -> None:
        views = views_of(served)
        self._gather = Gatherer(served)
        self._by_part = isinstance(served, BaseMixture) and len(served.shares) > 1
        self._bounds = np.cumsum([len(view) for view in views])
        names = list(served.shares) if isinstance(served, BaseMixture) and self._by_part else _files(served)
        self._sources = [f"loss_by_source/{name}" for name in names] if len(names) > 1 else []
        self._has_roles = any(view.settings.train_on not in ONE_ROLE for view in views)
        roles = list(ROLES.values()) if self._has_roles and not served.is_preference else []
        self.names = [*self._sources, *roles]

    def by_item(self, batch: Batch, losses: Tensor) -> Grouped:
        """Sums over groups, given the loss of each item."""
        if not self._sources:
            return {}
        return _sums(losses, torch.ones_like(losses), self._source_of(batch), self._sources)

    def by_token(self, batch: Batch, losses: Tensor, weights: Tensor) -> Grouped:
        """Sums over groups, given the weighted loss and the weight of each trained token."""
        if not self.names:
            return {}
        roles, counts = self._gather.trained_roles(batch.items)
        found: dict[str, tuple[Tensor, Tensor]] = {}
        if self._sources:
            found |= _sums(losses, weights, np.repeat(self._source_of(batch), counts), self._sources)
        if self._has_roles:
            numbers = np.searchsorted(np.array(list(ROLES)), roles)
            found |= _sums(losses, weights, numbers, list(ROLES.values()))
        return found

    def _source_of(self, batch: Batch) -> Int64:
        if self._by_part:
            return np.searchsorted(self._bounds, batch.items, side="right")
        return batch.places[:, 0]


def _files(served: Served) -> list[str]:
    """The files of a dataset, where that is known."""
    if isinstance(served, BaseMixture):
        return []
    notes: Mapping[str, object] = getattr(served.dataset, "notes", {})
    files = notes.get("files")
    return [str(file["name"]) for file in files] if isinstance(files, list) else []


def _sums(losses: Tensor, weights: Tensor, numbers: Int64, names: list[str]) -> dict[str, tuple[Tensor, Tensor]]:
    index = torch.from_numpy(np.asarray(numbers, np.int64)).to(losses.device)
    found = []
    for values in (losses, weights):
        found.append(torch.zeros(len(names), device=losses.device).index_add_(0, index, values.detach().float()))
    return {name: (found[0][k], found[1][k]) for k, name in enumerate(names)}
