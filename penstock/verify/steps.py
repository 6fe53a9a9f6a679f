"""Watches the steps of a training loop from outside: every backward call and every optimiser step of the process.

The loss is the scalar that `backward` is called on, whoever calls it. After enough of them the loop is left by raising
`Enough`, which no trainer catches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from penstock.verify.facts import StepFacts


class Enough(BaseException):
    """The loop was watched for long enough."""


class Steps:
    """Losses and gradient norms of a loop, and its end."""

    def __init__(self, steps: int, micros: int, on_done: Callable[[], None] | None) -> None:
        """Watch so many optimiser steps, or backward calls if they come first.

        Then `on_done` is told once, after an optimiser step; where it is None, the loop is ended.
        """
        self.losses: list[float | None] = []
        self.gradients: list[float | None] = []
        self.in_backward = False
        self._steps, self._micros, self._on_done = steps, micros, on_done
        self._told = False
        self._hooks: list[Any] = []

    @property
    def done(self) -> bool:
        """Whether enough was seen."""
        return len(self.gradients) >= self._steps or len(self.losses) >= self._micros

    def __enter__(self) -> Steps:
        plain: Any = torch.Tensor.backward
        self._plain = plain
        watch = self

        def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if watch.done:
                plain(self, *args, **kwargs)
                return
            loss = float(self.detach()) if self.numel() == 1 else float(self.detach().sum())
            watch.losses.append(_finite(loss))
            watch.in_backward = True
            try:
                plain(self, *args, **kwargs)
            finally:
                watch.in_backward = False
            if watch._on_done is None and len(watch.losses) >= watch._micros:
                raise Enough

        torch.Tensor.backward = backward  # type: ignore[method-assign]
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        torch.Tensor.backward = self._plain  # type: ignore[method-assign]
        if self._told:  # called from inside one of them; they do nothing any more
            return
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, optimizer: Any, *_: object) -> None:
        if self.done:
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        total = math.sqrt(sum(float(g.detach().float().pow(2).sum()) for g in gradients)) if gradients else 0.0
        self.gradients.append(_finite(total))

    def _after_step(self, *_: object) -> None:
        if not self.done or self._told:
            return
        if self._on_done is None:
            raise Enough
        self._told = True
        self._on_done()

    def facts(self) -> StepFacts:
        """What was seen."""
        return {"losses": self.losses, "gradients": self.gradients}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
