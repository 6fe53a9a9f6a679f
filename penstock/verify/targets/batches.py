"""Counts tokens, trained tokens, untrained rows and stop tokens in a trainer's batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from penstock.verify.facts import BatchFacts
from penstock.verify.targets.shrink import trained_mask


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
