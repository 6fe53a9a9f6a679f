"""Records the steps of a training loop from outside: all backward calls and optimiser steps in the process.

The loss is the scalar that `backward` is called on, whoever calls it. After enough steps, `StopTraining` is raised to
leave the loop; it derives from BaseException so that no trainer catches it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from penstock.verify.facts import StepFacts


class StopTraining(BaseException):
    """Raised to leave a training loop after enough steps."""


class StepRecorder:
    """Records losses and gradient norms, and ends the loop."""

    def __init__(self, steps: int, micros: int, on_done: Callable[[], None] | None) -> None:
        """Records `steps` optimiser steps or `micros` backward calls, whichever comes first.

        Then `on_done` is called once, after an optimiser step; if it is None, the loop is ended.
        """
        self.losses: list[float | None] = []
        self.gradients: list[float | None] = []
        self.in_backward = False
        self._steps, self._micros, self._on_done = steps, micros, on_done
        self._notified = False
        self._hooks: list[Any] = []

    @property
    def done(self) -> bool:
        """Whether enough steps were recorded."""
        return len(self.gradients) >= self._steps or len(self.losses) >= self._micros

    def __enter__(self) -> StepRecorder:
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
                raise StopTraining

        torch.Tensor.backward = backward  # type: ignore[method-assign]
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        torch.Tensor.backward = self._plain  # type: ignore[method-assign]
        if self._notified:  # called from inside a hook; from now on the hooks do nothing
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
        if not self.done or self._notified:
            return
        if self._on_done is None:
            raise StopTraining
        self._notified = True
        self._on_done()

    def facts(self) -> StepFacts:
        """The recorded losses and gradient norms."""
        return {"losses": self.losses, "gradients": self.gradients}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
