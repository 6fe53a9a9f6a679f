"""Losses as pure functions of tensors.

All results are sums, to be divided by a denominator over the global batch, so that micro-batches, ranks, padding and
packing affect only rounding. Log-probabilities are computed in fp32, and only for trained tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from penstock.train.config import Mean
from penstock.view.example import IGNORED


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
