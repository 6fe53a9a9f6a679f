"""What a configuration can't promise, refused before training with the reason and the remedy.

`check_config` needs nothing but the configuration and runs first. `check_isolation` is an experiment on the model
itself: what one packed sequence says must not reach another.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.errors import UsageError
from penstock.feed.collate import Padding, packed
from penstock.feed.settings import Collate
from penstock.train.config import DpoConfig, KtoConfig, LossConfig, Mean, Reference, TrainConfig
from penstock.train.errors import PromiseError
from penstock.train.tracking import check_trackers
from penstock.view.gather import Gathered
from penstock.view.policy import LossPolicy

LAST = (LossPolicy.LAST_ASSISTANT_TURN, LossPolicy.LAST_ASSISTANT_MESSAGE)


class Method(StrEnum):
    """What is trained for."""

    SFT = "sft"
    DPO = "dpo"
    KTO = "kto"

    @property
    def data(self) -> str:
        """The data that it trains on, in words."""
        return {"sft": "single conversations", "dpo": "pairs", "kto": "labelled answers (KTO)"}[self.value]


def check_config(config: TrainConfig, method: Method) -> None:
    """Refuse what contradicts itself, or can't be, whatever the model and the data are."""
    _check_model(config)
    _check_numbers(config)
    _check_method(config, method)
    if config.eval.every is not None and config.eval.holdout is None and not config.eval.sources:
        raise UsageError("eval.every, and nothing to evaluate on. Give eval.holdout or eval.sources.")
    if config.eval.holdout is not None and config.eval.sources:
        raise UsageError("eval.holdout and eval.sources both say what to evaluate on. Give one of them.")
    if config.log.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise PromiseError("log.tensorboard: tensorboard is not installed. Install it, or turn this off.")
    check_trackers(config.log)
    if config.lora.rank and importlib.util.find_spec("peft") is None:
        raise PromiseError(f"lora.rank={config.lora.rank}: peft is not installed. Install penstock[train].")


def _check_model(config: TrainConfig) -> None:
    if (config.model.path is None) == (config.model.init is None):
        raise UsageError(
            "give either model.path (a folder or a hub name) or model.init (a config.json, for random weights)."
        )
    if not config.data.sources:
        raise UsageError("data.sources is empty. Give at least one file, folder or dataset.")


def _check_numbers(config: TrainConfig) -> None:
    limits: list[tuple[str, float | None, float]] = [
        ("checkpoint.every", config.checkpoint.every, 1),
        ("checkpoint.keep", config.checkpoint.keep, 1),
        ("eval.every", config.eval.every, 1),
        ("lora.rank", config.lora.rank, 0),
        ("optim.lr", config.optim.lr, 0),
        ("optim.weight_decay", config.optim.weight_decay, 0),
    ]
    for name, value, least in limits:
        if value is not None and not value >= least:
            raise UsageError(f"{name}={value} is not possible. Use {least:g} or more.")
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
            if fused and config.loss.mean is not Mean.TOKEN:
                raise PromiseError(
                    "liger.fused_loss has no example mean. Set liger.fused_loss=false or loss.mean=token."
                )
        case Method.KTO:
            _check_kto(config, fused)
        case Method.DPO:
            if config.loss != LossConfig():
                raise UsageError(
                    "loss.mean is for supervised fine-tuning; DPO's loss is a mean over pairs. Leave it out."
                )
            if config.feed.collate not in (None, Collate.PAIRS):
                raise UsageError(f"feed.collate={config.feed.collate}: DPO trains on pairs. Leave it out.")
            if fused and config.dpo.reference is not Reference.LIVE:
                raise PromiseError(
                    "liger.fused_loss computes the reference along with the loss, so it can't use cached ones. "
                    "Set dpo.reference=live or liger.fused_loss=false."
                )
            if fused and config.dpo.label_smoothing:
                raise PromiseError("liger.fused_loss ignores label smoothing. Set one of them to off.")


def _check_kto(config: TrainConfig, fused: bool) -> None:
    if config.loss != LossConfig():
        raise UsageError("loss.mean is for supervised fine-tuning; KTO's loss is a mean over answers. Leave it out.")
    if config.feed.collate not in (None, Collate.PADDED):
        raise UsageError(f"feed.collate={config.feed.collate}: KTO trains on padded rows. Leave it out.")
    if min(config.feed.batch_size, config.feed.micro_batch or 2) < 2:
        raise UsageError("KTO compares answers with those of other rows: feed.micro_batch must be 2 or more.")
    if config.data.train_on not in LAST:
        raise UsageError(
            f"data.train_on={config.data.train_on}: a label judges the last answer alone. "
            f"Set data.train_on to {' or '.join(LAST)}."
        )
    if fused:
        raise PromiseError("liger.fused_loss has no KTO loss here. Set liger.fused_loss=false.")


Forward = Callable[[dict[str, Any]], Tensor]
_LENGTHS = (7, 9, 8)


def check_isolation(forward: Forward, vocabulary: int, attention: str) -> None:
    """Refuse to pack where a packed sequence sees another.

    The tokens of the first of three sequences are changed: logits of the others must not move by more than two equal
    runs differ, and its own must, or the experiment would have no power.
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
        raise PromiseError(
            f"feed.collate=packed: it can't be told whether attention {attention!r} keeps packed sequences apart "
            f"(changing a sequence moved its own logits by {own:g}). Use feed.collate=padded."
        )
    if others > max(2 * noise, 1e-5 * own):
        raise PromiseError(
            f"feed.collate=packed: with attention {attention!r} this model lets packed sequences see each other "
            f"(logits moved by {others:g}, a sequence's own by {own:g}). "
            "Use feed.collate=padded, or another model.attention."
        )


def _probe(vocabulary: int, change: int) -> dict[str, Any]:
    """Three packed sequences, as the feed packs them; the first one depends on `change`."""
    total = sum(_LENGTHS)
    ids = (np.arange(total, dtype=np.int64) * 13 + 5) % vocabulary
    ids[: _LENGTHS[0]] = (ids[: _LENGTHS[0]] + change * (1 + vocabulary // 3)) % vocabulary
    lengths = np.array(_LENGTHS, np.int64)
    found = Gathered(ids, np.ones(total, np.float32), lengths, ids[:0], ids[:0])
    arrays, _ = packed(found, 1, 0, Padding())
    return {name: array if isinstance(array, int) else torch.from_numpy(array) for name, array in arrays.items()}
