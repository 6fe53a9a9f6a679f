"""AdamW and its learning rate, which depends only on the step, so there is no scheduler state to save."""

from __future__ import annotations

import math

import torch
from torch import nn

from penstock.errors import UsageError
from penstock.train.config import OptimConfig, Schedule


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trainable weights; weight decay applies to matrices but not to norms and biases."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in trained if weight.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [weight for weight in trained if weight.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps
    )


def warmup_steps(config: OptimConfig, steps: int) -> int:
    """The number of warm-up steps, from a fraction of the run or a number."""
    if config.warmup < 0 or config.warmup != config.warmup:
        raise UsageError(f"optim.warmup={config.warmup} is neither a fraction of the run nor a number of steps.")
    if config.warmup < 1:
        return int(config.warmup * steps)
    warmup = int(config.warmup)
    if warmup >= steps:
        raise UsageError(
            f"optim.warmup={warmup} steps, but the run has only {steps}; the peak would never be reached. "
            "Lower it, or train longer."
        )
    return warmup


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The learning rate of a step (from 0) in a run of `steps` steps."""
    warmup = warmup_steps(config, steps)
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(steps - warmup, 1)
    match config.schedule:
        case Schedule.CONSTANT:
            share = 1.0
        case Schedule.LINEAR:
            share = 1 - done
        case Schedule.COSINE:
            share = 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (config.final + (1 - config.final) * share)
