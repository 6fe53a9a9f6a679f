"""Training objectives: SFT and DPO.

An objective computes the weight of a micro-batch in the global batch (`weight`) and the sum of its losses (`loss`). The
loop divides by the total weight over all micro-batches and ranks, so it doesn't matter how a step is split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from penstock.feed.batch import Batch
from penstock.train.config import Mean
from penstock.train.groups import Groups
from penstock.train.loss import dpo_terms, sequence_log_probs, sft_terms, targets
from penstock.train.model import forward_inputs
from penstock.view.example import IGNORED

Grouped = Mapping[str, tuple[Tensor, Tensor]]  # by name: the sum of losses, and of weights


class Sums(NamedTuple):
    """Sums over a micro-batch: of its losses, of further measures, and of losses by source and role."""

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
