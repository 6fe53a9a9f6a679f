"""KTO: answers that are labelled as good or bad, one by one, against a reference and an estimate of the KL divergence.

The estimate is the mean log-ratio of mismatched answers: as in TRL, each prompt of a micro-batch with the answer of the
row before. Ranks take the mean over the micro-batches that they compute at the same time. So unlike other losses, it
depends on how a step is cut up; a micro-batch of one row has no mismatched answer, and `validation` rejects it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from penstock.load.collate import Batch
from penstock.load.example import IGNORED
from penstock.train.config import KtoConfig, Mean
from penstock.train.objective import Groups, LiveModel, Policy, Sums, Targets, sequence_log_probs, targets

if TYPE_CHECKING:
    from accelerate import Accelerator


class Kto:
    """KTO's loss over labelled answers, against a live reference model."""

    def __init__(
        self,
        policy: Policy,
        reference: LiveModel,
        config: KtoConfig,
        accelerator: Accelerator,
        max_length: int | None = None,
        groups: Groups | None = None,
    ) -> None:
        self._policy, self._reference, self._config, self._groups = policy, reference, config, groups
        self._accelerator, self._max_length = accelerator, max_length

    def weight(self, batch: Batch) -> float:
        """Answers; rows that only fill up do not count."""
        return float(len(batch.items))

    def loss(self, batch: Batch) -> Sums:
        """The losses of the answers, and what is worth watching."""
        with torch.no_grad():
            mismatched = self._mismatched(batch)
            drifted = self._scored(self._policy.model, *mismatched)
            with self._reference.active() as model:
                known, expected = self._answers(batch, model), self._scored(model, *mismatched)
        kl = self._shared((drifted - expected).mean() if len(drifted) else drifted.sum()).clamp(min=0)
        ratios = self._answers(batch, self._policy.model) - known
        good = batch.tensors["desirable"][: len(ratios)].to(ratios.device).bool()
        losses = kto_losses(ratios, good, kl, self._config)
        rewards = self._config.beta * ratios.detach()
        return Sums(
            losses.sum(),
            {
                "kl": kl * len(ratios),
                "reward_desirable": rewards[good].sum(),
                "reward_undesirable": rewards[~good].sum(),
                "desirable": good.sum(),
            },
            {} if self._groups is None else self._groups.by_item(batch, losses),
        )

    def _shared(self, kl: Tensor) -> Tensor:
        """The mean over ranks."""
        if self._accelerator.num_processes == 1:
            return kl
        mean: Tensor = self._accelerator.reduce(kl, "mean")
        return mean

    def _answers(self, batch: Batch, model: nn.Module) -> Tensor:
        tensors = self._policy.on_device(batch.tensors)
        logits = self._policy(tensors, model=model).logits
        return sequence_log_probs(logits, targets(tensors, Mean.TOKEN))[: len(batch.items)]

    def _scored(self, model: nn.Module, tensors: dict[str, Tensor], wanted: Targets) -> Tensor:
        if not len(tensors["input_ids"]):
            return torch.zeros(0, device=self._policy.device)
        moved = self._policy.on_device(tensors)
        labels, weights = (value.to(self._policy.device) for value in wanted)
        return sequence_log_probs(self._policy(moved, model=model).logits, Targets(labels, weights))

    def _mismatched(self, batch: Batch) -> tuple[dict[str, Tensor], Targets]:
        """Each prompt with the answer of the row before, padded on the right."""
        tensors, rows = batch.tensors, len(batch.items)
        parts = [_split(tensors, row) for row in range(rows)]
        joined = [
            tuple(torch.cat(pair)[: self._max_length] for pair in zip(parts[k][0], parts[k - 1][1], strict=True))
            for k in range(rows)
        ]
        lengths = [len(ids) for ids, _, _ in joined]
        ids, labels, weights = (
            torch.nn.utils.rnn.pad_sequence([row[k] for row in joined], batch_first=True, padding_value=value)
            if joined
            else torch.zeros((0, 1))
            for k, value in enumerate((0, IGNORED, 0))
        )
        mask = (torch.arange(ids.shape[1])[None] < torch.tensor(lengths).reshape(-1, 1)).long()
        wanted = Targets(labels[:, 1:], torch.where(labels[:, 1:] == IGNORED, 0.0, weights[:, 1:]))
        return {"input_ids": ids, "attention_mask": mask}, wanted


Columns = tuple[Tensor, Tensor, Tensor]  # ids, labels, weights


def _split(tensors: Mapping[str, Tensor], row: int) -> tuple[Columns, Columns]:
    """Prompt and answer of a row: what stands before its first trained token, and the rest."""
    inside = tensors["attention_mask"][row].bool()
    ids, labels, weights = (tensors[name][row][inside] for name in ("input_ids", "labels", "loss_weights"))
    trained = torch.nonzero(labels != IGNORED)
    at = int(trained[0]) if len(trained) else len(ids)
    prompt = ids[:at], torch.full_like(labels[:at], IGNORED), torch.zeros_like(weights[:at])
    return prompt, (ids[at:], labels[at:], weights[at:])


def kto_losses(ratios: Tensor, desirable: Tensor, kl: Tensor, config: KtoConfig) -> Tensor:
    """The loss of each answer, given the log-ratio of policy and reference."""
    sign = torch.where(desirable, 1.0, -1.0)
    weights = torch.where(desirable, config.desirable_weight, config.undesirable_weight)
    return weights * (1 - torch.sigmoid(config.beta * sign * (ratios - kl)))
