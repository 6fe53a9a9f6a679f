"""Rejects unsupported configurations before training, with the reason and the remedy.

`check_config` needs only the configuration and runs first. `check_isolation` tests by experiment that packed sequences
don't attend to each other in the model itself.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.errors import UnsupportedError, UsageError
from penstock.load.collate import Padding, packed
from penstock.load.gather import Gathered
from penstock.load.options import Collate, LossPolicy
from penstock.train.config import DpoConfig, KtoConfig, LossConfig, Mean, ReferenceMode, TrainConfig
from penstock.train.metrics import check_trackers

LAST = (LossPolicy.LAST_ASSISTANT_TURN, LossPolicy.LAST_ASSISTANT_MESSAGE)


class Method(StrEnum):
    """The training method."""

    SFT = "sft"
    DPO = "dpo"
    KTO = "kto"

    @property
    def data(self) -> str:
        """The data that it trains on, in words."""
        return {"sft": "single conversations", "dpo": "preference pairs", "kto": "labelled answers (KTO)"}[self.value]


def method_named(name: str) -> Method:
    """The method with this name."""
    if name not in [*Method]:
        raise UsageError(f"{name!r:.60} is not a training method. Use 'sft', 'dpo' or 'kto'.")
    return Method(name)


def check_config(config: TrainConfig, method: Method) -> None:
    """Raises an error for contradictions and impossible values, independent of model and data."""
    _check_model(config)
    _check_numbers(config)
    _check_method(config, method)
    if config.eval.every is not None and config.view.holdout is None and not config.eval.sources:
        raise UsageError("eval.every is set, but there is nothing to evaluate on. Set view.holdout or eval.sources.")
    if config.view.holdout is not None and config.eval.sources:
        raise UsageError("view.holdout and eval.sources are mutually exclusive. Set one of them.")
    if config.log.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UnsupportedError("log.tensorboard: tensorboard is not installed. Install it, or turn this off.")
    check_trackers(config.log)
    if config.lora.rank and importlib.util.find_spec("peft") is None:
        raise UnsupportedError(f"lora.rank={config.lora.rank}: peft is not installed. Install penstock[train].")


def _check_model(config: TrainConfig) -> None:
    if (config.model.path is None) == (config.model.init is None):
        raise UsageError(
            "set either model.path (a folder or a hub name) or model.init (a config.json, for random weights)."
        )
    if not config.data.sources:
        raise UsageError("data.sources is empty. Add at least one file, folder or dataset.")


def _check_numbers(config: TrainConfig) -> None:
    if config.optim.clip is not None and not config.optim.clip > 0:
        raise UsageError(f"optim.clip={config.optim.clip} would stop all learning. Use more than 0, or null for none.")
    if config.dpo.beta <= 0 or not 0 <= config.dpo.label_smoothing < 0.5:
        raise UsageError("dpo.beta must be above 0, and dpo.label_smoothing at least 0 and below 0.5.")
    if config.kto.beta <= 0 or min(config.kto.desirable_weight, config.kto.undesirable_weight) < 0:
        raise UsageError("kto.beta must be above 0, and the weights of answers at least 0.")


def _check_method(config: TrainConfig, method: Method) -> None:
    fused = config.liger.enabled and config.liger.fused_loss
    for other, is_set in ((Method.DPO, config.dpo != DpoConfig()), (Method.KTO, config.kto != KtoConfig())):
        if is_set and method is not other:
            raise UsageError(
                f"{other} is set, and this is `penstock train {method}`. Use `penstock train {other}`, or leave it out."
            )
    match method:
        case Method.SFT:
            if config.loader.collate is Collate.TREE:
                raise UnsupportedError(
                    "loader.collate=tree: a tree relies on its own attention mask, and no check shows that this model "
                    "honours it, as one does for packed rows. Use loader.collate=packed or padded."
                )
            if fused and config.loss.mean is not Mean.TOKEN:
                raise UnsupportedError(
                    "liger.fused_loss does not support loss.mean=example. "
                    "Set liger.fused_loss=false or loss.mean=token."
                )
        case Method.KTO:
            _check_kto(config, fused)
        case Method.DPO:
            if config.loss != LossConfig():
                raise UsageError("loss.mean is for supervised fine-tuning; DPO's loss is a mean over pairs. Remove it.")
            if config.loader.collate not in (None, Collate.PAIRS):
                raise UsageError(f"loader.collate={config.loader.collate}: DPO trains on pairs. Remove it.")
            if fused and config.dpo.reference is not ReferenceMode.LIVE:
                raise UnsupportedError(
                    "liger.fused_loss computes the reference along with the loss and can't use cached references. "
                    "Set dpo.reference=live or liger.fused_loss=false."
                )
            if fused and config.dpo.label_smoothing:
                raise UnsupportedError("liger.fused_loss ignores label smoothing. Turn one of them off.")


def _check_kto(config: TrainConfig, fused: bool) -> None:
    if config.loss != LossConfig():
        raise UsageError("loss.mean is for supervised fine-tuning; KTO's loss is a mean over answers. Leave it out.")
    if config.loader.collate not in (None, Collate.PADDED):
        raise UsageError(f"loader.collate={config.loader.collate}: KTO trains on padded rows. Leave it out.")
    if min(config.loader.batch_size, config.loader.micro_batch or 2) < 2:
        raise UsageError("KTO compares answers with those of other rows: loader.micro_batch must be 2 or more.")
    if config.view.train_on not in (None, *LAST):
        raise UsageError(
            f"view.train_on={config.view.train_on}: a label judges the last answer alone. "
            f"Set view.train_on to {' or '.join(LAST)}."
        )
    if fused:
        raise UnsupportedError("liger.fused_loss has no KTO loss here. Set liger.fused_loss=false.")


Forward = Callable[[dict[str, Any]], Tensor]
_LENGTHS = (7, 9, 8)


def check_isolation(forward: Forward, vocabulary: int, attention: str) -> None:
    """Raises an error if packed sequences attend to each other.

    The first of three packed sequences is changed: the others' logits must not move by more than two identical runs
    differ, and its own must move, or the experiment has no power.
    """
    before, again, after = (
        forward(_probe(vocabulary, 0)),
        forward(_probe(vocabulary, 0)),
        forward(_probe(vocabulary, 1)),
    )
    first = _LENGTHS[0]
    noise = (before - again).abs().max().item()
    own = (before - after)[:, :first].abs().max().item()
    others = (before - after)[:, first:].abs().max().item()
    if not own > max(10 * noise, 1e-6):
        raise UnsupportedError(
            f"loader.collate=packed: can't determine whether attention {attention!r} isolates packed sequences "
            f"(changing a sequence moved its own logits by {own:g}). Use loader.collate=padded."
        )
    if others > max(2 * noise, 1e-5 * own):
        raise UnsupportedError(
            f"loader.collate=packed: with attention {attention!r}, packed sequences of this model attend to each other "
            f"(logits moved by {others:g}, a sequence's own by {own:g}). "
            "Use loader.collate=padded, or another model.attention."
        )


def _probe(vocabulary: int, change: int) -> dict[str, Any]:
    """Three sequences, packed as by the feed; the first one depends on `change`."""
    total = sum(_LENGTHS)
    ids = (np.arange(total, dtype=np.int64) * 13 + 5) % vocabulary
    ids[: _LENGTHS[0]] = (ids[: _LENGTHS[0]] + change * (1 + vocabulary // 3)) % vocabulary
    lengths = np.array(_LENGTHS, np.int64)
    found = Gathered(ids, np.ones(total, np.float32), lengths, ids[:0], ids[:0])
    arrays, _ = packed(found, 1, 0, Padding())
    return {name: array if isinstance(array, int) else torch.from_numpy(array) for name, array in arrays.items()}
