"""Evaluation: the mean of the objective over held-out data, each item once, unshuffled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from penstock.feed.loader import Loader
from penstock.train.metrics import EvalReport
from penstock.train.objective import Objective, Policy

if TYPE_CHECKING:
    from accelerate import Accelerator


class Evaluator:
    """Evaluates an objective over a loader."""

    def __init__(self, accelerator: Accelerator, policy: Policy, objective: Objective, loader: Loader) -> None:
        self._accelerator, self._policy, self._objective, self._loader = accelerator, policy, objective, loader

    def run(self, step: int) -> EvalReport:
        """Evaluates after `step` steps; the model is left in training mode."""
        started = time.perf_counter()
        sums: dict[str, float] = {"weight": 0.0, "loss": 0.0}
        self._policy.model.eval()
        with torch.no_grad():
            for batch in self._loader:
                found = self._objective.loss(batch)
                sums["weight"] += self._objective.weight(batch)
                sums["loss"] += float(found.loss)
                for name, value in found.measures.items():
                    sums[name] = sums.get(name, 0.0) + float(value)
                for name, pair in found.groups.items():
                    for k, value in enumerate(pair):
                        sums[f"{name} {k}"] = sums.get(f"{name} {k}", 0.0) + float(value)
        self._policy.model.train()
        names = sorted(sums)
        values = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=self._accelerator.device)
        total = dict(zip(names, self._accelerator.reduce(values, "sum").tolist(), strict=True))
        weight = total.pop("weight") or 1.0
        loss = total.pop("loss") / weight
        groups = sorted({name.rpartition(" ")[0] for name in total if " " in name})
        means = group_means(groups, [total.pop(f"{name} {k}") for name in groups for k in range(2)])
        measures = {name: value / weight for name, value in total.items()}
        return EvalReport(step, loss, time.perf_counter() - started, {**measures, **means})


def group_means(names: Sequence[str], sums: Sequence[float]) -> dict[str, float]:
    """The means of groups, given the sum of losses and of weights of each in turn; groups without weight have none."""
    return {name: loss / weight for name, loss, weight in zip(names, sums[0::2], sums[1::2], strict=True) if weight}
