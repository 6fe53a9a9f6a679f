"""`transformers.Trainer` and its subclasses, including TRL's, as targets."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from penstock.train.verify.observations import BatchFacts
from penstock.train.verify.observer import model_of
from penstock.train.verify.probe_inputs import (
    Canaries,
    keep_first_rows,
    sequence_numbers,
    shorten_rows,
    shrink_model,
    trained_mask,
)
from penstock.train.verify.target import ProbeLimits

# ---- batches ---------------------------------------------------------------------------------------------------------
#
# Counts tokens, trained tokens, untrained rows and stop tokens in a trainer's batches.


class BatchCounter:
    """Sums over the batches that a trainer passes to its training step."""

    def __init__(self, stops: Iterable[int]) -> None:
        self._stops = torch.tensor(sorted(set(stops)), dtype=torch.long)
        self._sums: Counter[str] = Counter()
        self._keys: set[str] = set()

    def add(self, inputs: Mapping[str, Any]) -> None:
        """Counts one batch."""
        ids = inputs.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            return
        ids = ids.detach().cpu()
        trained = trained_mask(inputs).cpu()
        mask = inputs.get("attention_mask")
        real = (
            mask.bool().cpu()
            if isinstance(mask, torch.Tensor) and mask.shape == ids.shape
            else torch.ones_like(trained)
        )
        stops = torch.isin(ids, self._stops) & real
        self._keys |= set(inputs)
        self._sums.update(
            rows=ids.shape[0],
            cells=ids.numel(),
            tokens=int(real.sum()),
            trained=int((trained & real).sum()),
            rows_untrained=int((~(trained & real).any(dim=1)).sum()),
            stops=int(stops.sum()),
            stops_trained=int((stops & trained).sum()),
        )

    def facts(self) -> BatchFacts | None:
        """The sums, or None if no batch was seen."""
        if not self._sums["rows"]:
            return None
        sums = self._sums
        return {
            "rows": sums["rows"],
            "cells": sums["cells"],
            "tokens": sums["tokens"],
            "trained": sums["trained"],
            "rows_untrained": sums["rows_untrained"],
            "stops": sums["stops"],
            "stops_trained": sums["stops_trained"],
            "keys": sorted(self._keys),
        }


# ---- hf trainer ------------------------------------------------------------------------------------------------------


class HfTrainer:
    """A trainer returned by a factory, limited to a few steps."""

    def __init__(self, trainer: Any, limits: ProbeLimits, canaries: Canaries | None) -> None:
        self._trainer, self._limits, self._canaries = trainer, limits, canaries
        self.model: Any = trainer.model
        self.promised = _promises(trainer)
        self.conditions = self._cut()
        self._counted = BatchCounter(_stops(trainer))

    def _cut(self) -> list[str]:
        if self._limits.layers is None:
            return []
        models = [self._trainer.model, getattr(self._trainer, "ref_model", None)]
        cuts = [shrink_model(model, self._limits.layers) for model in models if model is not None]
        conditions = [cut for cut in cuts[:1] if cut]
        if self._limits.tokens is not None:
            conditions.append(f"batches cut to {self._limits.rows} rows or pairs of {self._limits.tokens} tokens")
        return conditions

    def run(self) -> None:
        """Trains without saving, evaluating or reporting anything."""
        trainer = self._trainer
        arguments = trainer.args
        arguments.max_steps = max(self._limits.steps, 1)
        arguments.num_train_epochs = 1_000  # a short dataset must not end the run early
        for name in ("save_strategy", "eval_strategy", "logging_strategy"):
            setattr(arguments, name, type(getattr(arguments, name))("no"))
        arguments.output_dir = str(self._limits.folder)
        arguments.push_to_hub = False
        arguments.disable_tqdm = True
        for callback in list(trainer.callback_handler.callbacks):
            module = type(callback).__module__
            if module.startswith("transformers.integrations") or "Progress" in type(callback).__name__:
                trainer.remove_callback(callback)
        self._intercept()
        trainer.train()

    def _intercept(self) -> None:
        """Counts each batch that the trainer passes to its training step, and cuts it."""
        plain, trainer = self._trainer.training_step, self._trainer
        if self._canaries is not None and not self._canaries.packed:
            collate, canaries = trainer.data_collator, self._canaries
            trainer.data_collator = lambda features: collate(canaries.rewrite(list(features)))

        def step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._counted.add(inputs)
            return plain(model, self._shortened(inputs), *args, **kwargs)

        trainer.training_step = step

    def _shortened(self, inputs: Any) -> Any:
        if self._limits.tokens is None or not isinstance(inputs, Mapping) or "input_ids" not in inputs:
            return inputs
        around = None
        if self._canaries is not None:
            changes = sequence_numbers(inputs["input_ids"]).diff(dim=1).any(dim=0).nonzero()
            around = int(changes[0]) + 1 if len(changes) else None
        cut = shorten_rows(inputs, self._limits.tokens, around)
        return keep_first_rows(cut, self._limits.rows, pairs=self.promised["dpo"])

    def batches(self) -> BatchFacts | None:
        """Counts over the batches before they were cut."""
        return self._counted.facts()


def _stops(trainer: Any) -> set[int]:
    """The ids that end a turn according to the tokenizer and the generation config."""
    tokenizer = getattr(trainer, "processing_class", None)
    generation = getattr(model_of(trainer.model), "generation_config", None)
    found: set[int] = set()
    for value in (getattr(tokenizer, "eos_token_id", None), getattr(generation, "eos_token_id", None)):
        found |= set(value) if isinstance(value, (list, tuple)) else {value} if isinstance(value, int) else set()
    return found


def _promises(trainer: Any) -> dict[str, Any]:
    """What the trainer's settings promise."""
    arguments = trainer.args
    packing = bool(getattr(arguments, "packing", False))
    flattens = bool(getattr(arguments, "padding_free", False)) or "Flattening" in type(trainer.data_collator).__name__
    trl = type(trainer).__module__.startswith("trl.") and sys.modules.get("trl")
    return {
        "trainer": type(trainer).__name__,
        "liger": bool(getattr(arguments, "use_liger_kernel", False)),
        "liger_config": getattr(arguments, "liger_kernel_config", None) or {},
        "dpo": "DPO" in type(trainer).__name__,
        "bf16": bool(getattr(arguments, "bf16", False)),
        "gradient_checkpointing": bool(getattr(arguments, "gradient_checkpointing", False)),
        "packing": packing or flattens,
        "packing_strategy": getattr(arguments, "packing_strategy", None) if packing else None,
        "lora": hasattr(trainer.model, "peft_config"),
        "trl": bool(trl),
    }
