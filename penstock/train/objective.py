"""Training objectives: SFT and DPO.

An objective computes the weight of a micro-batch in the global batch (`weight`) and the sum of its losses (`loss`). The
loop divides by the total weight over all micro-batches and ranks, so it doesn't matter how a step is split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from penstock.arrays import Int64
from penstock.load.collate import Batch
from penstock.load.example import IGNORED
from penstock.load.gather import Gatherer
from penstock.load.options import LossPolicy
from penstock.load.parts import PART_NAMES
from penstock.load.view import Served
from penstock.prepare.chat.conversation import Role
from penstock.train.config import Mean
from penstock.train.model import forward_inputs

# ---- loss ------------------------------------------------------------------------------------------------------------
#
# Losses as pure functions of tensors.
#
# All results are sums, to be divided by a denominator over the global batch, so that micro-batches, ranks, padding and
# packing affect only rounding. Log-probabilities are computed in fp32, and only for trained tokens.


class Targets(NamedTuple):
    """For each position, the label of the next token and its weight (0 if untrained)."""

    labels: Tensor
    weights: Tensor


def targets(tensors: Mapping[str, Any], mean: Mean) -> Targets:
    """Labels and weights, shifted left by one. With an example mean, the weights of each example sum to 1."""
    labels = tensors["labels"][:, 1:]
    weights = torch.where(labels == IGNORED, 0.0, tensors["loss_weights"][:, 1:])
    match mean:
        case Mean.TOKEN:
            return Targets(labels, weights)
        case Mean.EXAMPLE:
            return Targets(labels, _shares(weights, _owners(tensors, weights)))


def _owners(tensors: Mapping[str, Any], like: Tensor) -> Tensor:
    """The index of the example that each token belongs to."""
    if "seq_idx" in tensors:
        return tensors["seq_idx"][:, 1:].long()  # type: ignore[no-any-return]
    return torch.arange(len(like), device=like.device)[:, None].expand_as(like)


def _shares(weights: Tensor, owners: Tensor) -> Tensor:
    if not owners.numel():  # a filler row has a single token
        return weights
    totals = torch.zeros(int(owners.max()) + 1, device=weights.device)
    totals.index_add_(0, owners.flatten(), weights.flatten())
    return torch.where(weights > 0, weights / totals[owners].clamp(min=torch.finfo(totals.dtype).tiny), 0.0)


def log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """The log-probability of each label, 0 if it is ignored; `labels` are one shorter than the logits."""
    trained = labels != IGNORED
    picked = -F.cross_entropy(logits[:, :-1][trained].float(), labels[trained], reduction="none")
    return torch.zeros(labels.shape, dtype=picked.dtype, device=picked.device).masked_scatter(trained, picked)


def sft_terms(logits: Tensor, wanted: Targets) -> tuple[Tensor, Tensor]:
    """Of the trained tokens in order: the weighted negative log-probabilities, and the weights."""
    trained = wanted.labels != IGNORED
    weights = wanted.weights[trained]
    return -log_probs(logits, wanted.labels)[trained] * weights, weights


def sequence_log_probs(logits: Tensor, wanted: Targets) -> Tensor:
    """The weighted sum of log-probabilities of each row."""
    return (log_probs(logits, wanted.labels) * wanted.weights).sum(dim=1)


class DpoTerms(NamedTuple):
    """The loss of each pair, and the rewards of both sides."""

    losses: Tensor
    chosen: Tensor
    rejected: Tensor


def dpo_terms(policy: Tensor, reference: Tensor, beta: float, label_smoothing: float) -> DpoTerms:
    """DPO's sigmoid loss; log-probabilities are [2n]: all chosen, then all rejected."""
    chosen, rejected = (beta * (policy - reference)).chunk(2)
    margin = chosen - rejected
    losses = -F.logsigmoid(margin) * (1 - label_smoothing) - F.logsigmoid(-margin) * label_smoothing
    return DpoTerms(losses, chosen.detach(), rejected.detach())


# ---- groups ----------------------------------------------------------------------------------------------------------
# Losses by source, role and part: which group each term of a batch's loss belongs to.
#
# Sources are the members of a mixture, or the files of one dataset; a single one makes no group. Roles make groups
# where a loss policy may train more than one. The loss of a part is the mean over its tokens, without their weights.
# Terms appear in the order of the batch: of a token loss they are its trained tokens, sequence by sequence, of an item
# loss its items.


ROLES = {role: f"loss_by_role/{role.name.lower()}" for role in Role if role is not Role.NONE}
ONE_ROLE = (
    LossPolicy.ALL_ASSISTANT_MESSAGES,
    LossPolicy.LAST_ASSISTANT_MESSAGE,
    LossPolicy.LAST_ASSISTANT_TURN,
)


class Groups:
    """The groups of a view or mixture."""

    def __init__(self, served: Served) -> None:
        views = served.views
        self._gather = Gatherer(served)
        self._by_member = len(served.members) > 1
        self._bounds = np.cumsum([len(view) for view in views])
        names = served.source_names
        self._sources = [f"loss_by_source/{name}" for name in names] if len(names) > 1 else []
        self._has_roles = any(view.settings.policy not in ONE_ROLE for view in views)
        roles = list(ROLES.values()) if self._has_roles and not served.is_preference else []
        trained = {} if served.is_preference or served.is_labelled else served.ledger.trained_by_part
        parts = [part for part, name in PART_NAMES.items() if name in trained]
        self._parts = {part: f"loss_by_part/{PART_NAMES[part]}" for part in parts if len(parts) > 1}
        self.names = [*self._sources, *roles, *self._parts.values()]

    def by_item(self, batch: Batch, losses: Tensor) -> Grouped:
        """Sums over groups, given the loss of each item."""
        if not self._sources:
            return {}
        return _sums(losses, torch.ones_like(losses), self._source_of(batch), self._sources)

    def by_token(self, batch: Batch, losses: Tensor, weights: Tensor) -> Grouped:
        """Sums over groups, given the weighted loss and the weight of each trained token."""
        if not self.names:
            return {}
        roles, parts, counts = self._gather.trained_origins(batch.items)
        found: dict[str, tuple[Tensor, Tensor]] = {}
        if self._sources:
            found |= _sums(losses, weights, np.repeat(self._source_of(batch), counts), self._sources)
        if self._has_roles:
            numbers = np.searchsorted(np.array(list(ROLES)), roles)
            found |= _sums(losses, weights, numbers, list(ROLES.values()))
        if self._parts:
            numbers, plain = np.searchsorted(np.array(list(self._parts)), parts), losses.detach() / weights
            found |= _sums(plain, torch.ones_like(plain), numbers, list(self._parts.values()))
        return found

    def _source_of(self, batch: Batch) -> Int64:
        if self._by_member:
            return np.searchsorted(self._bounds, batch.items, side="right")
        return batch.places[:, 0]


def _sums(losses: Tensor, weights: Tensor, numbers: Int64, names: list[str]) -> dict[str, tuple[Tensor, Tensor]]:
    index = torch.from_numpy(np.asarray(numbers, np.int64)).to(losses.device)
    found = []
    for values in (losses, weights):
        found.append(torch.zeros(len(names), device=losses.device).index_add_(0, index, values.detach().float()))
    return {name: (found[0][k], found[1][k]) for k, name in enumerate(names)}


# ---- objective -------------------------------------------------------------------------------------------------------


Grouped = Mapping[str, tuple[Tensor, Tensor]]  # by name: the sum of losses, and of weights


class Sums(NamedTuple):
    """Sums over a micro-batch: of its losses, of further measures, and of losses by source, role and part."""

    loss: Tensor
    measures: Mapping[str, Tensor]
    groups: Grouped = {}  # noqa: RUF012 (nobody changes it)


class Objective(Protocol):
    """A loss over batches."""

    def weight(self, batch: Batch) -> float:
        """The weight of the batch in the mean."""
        ...

    def loss(self, batch: Batch) -> Sums:
        """The sum of the batch's losses."""
        ...


class Policy(NamedTuple):
    """The model being trained: `model` as wrapped for distribution, `plain` the transformers model inside."""

    model: nn.Module
    plain: Any
    device: torch.device
    autocast: torch.dtype | None

    def computing(self) -> AbstractContextManager[Any]:
        """A context with the precision of forward passes."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast)

    def __call__(self, tensors: Mapping[str, Any], *, model: nn.Module | None = None, **extra: Any) -> Any:
        """Runs a forward pass of the model, or of another one with the same inputs."""
        inputs = {name: self._moved(value) for name, value in forward_inputs(self.plain, tensors).items()}
        with self.computing():
            return (model or self.model)(**inputs, use_cache=False, **extra)

    def on_device(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Moves all tensors to the model's device."""
        return {name: self._moved(value) for name, value in tensors.items()}

    def _moved(self, value: Any) -> Any:
        return value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value


class Sft:
    """Weighted cross entropy of the trained tokens."""

    def __init__(self, policy: Policy, mean: Mean, fused: bool, groups: Groups | None = None) -> None:
        """`fused`: the model's forward computes the sum with Liger, without materialising logits."""
        self._policy, self._mean, self._fused, self._groups = policy, mean, fused, groups

    def weight(self, batch: Batch) -> float:
        """The sum of the tokens' weights, or the number of examples with an example mean."""
        return float(targets(batch.tensors, self._mean).weights.double().sum())

    def loss(self, batch: Batch) -> Sums:
        """The weighted sum of negative log-probabilities."""
        tensors = self._policy.on_device(batch.tensors)
        if self._fused and self._policy.model.training:
            return Sums(self._policy(tensors, labels=tensors["labels"], num_items_in_batch=1).loss, {})
        logits = self._policy(tensors).logits
        losses, weights = sft_terms(logits, targets(tensors, self._mean))
        return Sums(losses.sum(), {}, {} if self._groups is None else self._groups.by_token(batch, losses, weights))


References = Callable[[Batch], Tensor]


class LiveModel(Protocol):
    """A reference model that is evaluated during training."""

    @property
    def plain(self) -> Any:
        """The transformers model."""
        ...

    def active(self) -> AbstractContextManager[nn.Module]:
        """A context in which the model may be called."""
        ...


class Dpo:
    """DPO's sigmoid loss over pairs, relative to reference log-probabilities."""

    def __init__(
        self,
        policy: Policy,
        references: References,
        beta: float,
        label_smoothing: float,
        groups: Groups | None = None,
    ) -> None:
        """`references`: the log-probabilities [2n] of a batch's real pairs, all chosen and then all rejected."""
        self._policy, self._references, self._groups = policy, references, groups
        self._beta, self._smoothing = beta, label_smoothing

    def weight(self, batch: Batch) -> float:
        """Pairs; rows that only fill up do not count."""
        return float(len(batch.items))

    def loss(self, batch: Batch) -> Sums:
        """The sum of the pairs' losses, and of their rewards."""
        policy = pair_log_probs(self._policy, batch)
        terms = dpo_terms(policy, self._references(batch), self._beta, self._smoothing)
        groups = {} if self._groups is None else self._groups.by_item(batch, terms.losses)
        return Sums(terms.losses.sum(), reward_sums(terms.chosen, terms.rejected), groups)


def pair_log_probs(policy: Policy, batch: Batch, *, model: nn.Module | None = None) -> Tensor:
    """The log-probabilities [2n] of a batch's real pairs."""
    tensors = policy.on_device(batch.tensors)
    logits = policy(tensors, model=model).logits
    return sequence_log_probs(logits, targets(tensors, Mean.TOKEN))[real_rows(batch)]


def real_rows(batch: Batch) -> Tensor:
    """Indices of the rows that hold pairs: each side may be followed by filler rows."""
    rows, pairs = batch.tensors["input_ids"].shape[0] // 2, len(batch.items)
    return torch.cat((torch.arange(pairs), rows + torch.arange(pairs)))


def reward_sums(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Sums of reward statistics over pairs."""
    return {
        "reward_accuracy": (chosen > rejected).sum(),
        "reward_margin": (chosen - rejected).sum(),
        "reward_chosen": chosen.sum(),
        "reward_rejected": rejected.sum(),
    }


class FusedDpo:
    """DPO's loss computed by Liger, fused with the LM head so that logits are not materialised."""

    def __init__(self, policy: Policy, reference: LiveModel, beta: float) -> None:
        from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

        self._policy, self._reference = policy, reference
        self._fused = LigerFusedLinearDPOLoss(ignore_index=IGNORED, beta=beta, compiled=policy.device.type == "cuda")

    def weight(self, batch: Batch) -> float:
        """Pairs; rows that only fill up do not count."""
        return float(len(batch.items))

    def loss(self, batch: Batch) -> Sums:
        """The sum of the pairs' losses, and of their rewards."""
        rows = real_rows(batch)
        states = self._states(batch, self._policy.model)[rows]
        if not len(rows):  # nothing to compare, but all ranks must take part in the backward pass
            return Sums(states.sum(), reward_sums(*states.detach().new_zeros((2, 0))))
        with torch.no_grad(), self._reference.active() as model:
            known = self._states(batch, model)[rows]
        labels = targets(self._policy.on_device(batch.tensors), Mean.TOKEN).labels[rows]
        heads = [part.get_output_embeddings().weight for part in (self._policy.plain, self._reference.plain)]
        with self._policy.computing():
            mean, found = self._fused(heads[0], states, labels, ref_input=known, ref_weight=heads[1])
        return Sums(mean * len(batch.items), reward_sums(found[-2].detach(), found[-1].detach()))

    def _states(self, batch: Batch, model: nn.Module) -> Tensor:
        """The hidden states that predict the labels. Logits are requested for a single position."""
        found = self._policy(batch.tensors, model=model, output_hidden_states=True, logits_to_keep=1)
        states: Tensor = found.hidden_states[-1][:, :-1]
        return states
