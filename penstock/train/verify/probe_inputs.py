"""Canaries: packed sequences rewritten in token ids of their own band, so that boundaries can be read from content.

Positions and masks are what is under test, so they can't be used to find the boundaries. Content is replaced just
before sequences are packed; lengths don't change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.train.verify.observer import decoder_layers, model_of

WIDTH = 8  # ids in a band


def band(number: int, length: int, vocabulary: int) -> list[int]:
    """Token ids for one sequence: those of its band, repeated to `length`."""
    bands = max(2, vocabulary // WIDTH)
    start = (number % bands) * WIDTH
    return [min(start + place % WIDTH, vocabulary - 1) for place in range(length)]


def sequence_numbers(ids: torch.Tensor) -> torch.Tensor:
    """The number, within its row, of the sequence that each position belongs to."""
    bands = ids // WIDTH
    changes = torch.zeros_like(bands)
    changes[:, 1:] = bands[:, 1:] != bands[:, :-1]
    return changes.cumsum(dim=1)


class Canaries:
    """Numbers sequences in the order they are packed."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._count = 0
        self.packed = False  # whether a packer that we patched has run

    def next(self, length: int) -> list[int]:
        """Token ids for the next sequence."""
        self._count += 1
        return band(self._count - 1, length, self._vocabulary)

    def rewrite(self, features: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Replaces the token ids of each row, for a collator that packs."""
        return [
            {**row, "input_ids": self.next(len(row["input_ids"]))} if "input_ids" in row else row for row in features
        ]


@contextmanager
def patch_trl(canaries: Canaries) -> Iterator[None]:
    """Replaces the content of sequences that TRL packs."""
    import trl.trainer.sft_trainer as module

    sft_trainer: Any = module
    plain = sft_trainer.pack_dataset

    def pack(dataset: Any, *args: Any, **kwargs: Any) -> Any:
        canaries.packed = True
        rows = dataset.map(
            lambda row: {"input_ids": canaries.next(len(row["input_ids"]))},
            new_fingerprint=f"canaries{id(canaries)}",
            keep_in_memory=True,
        )
        return plain(rows, *args, **kwargs)

    sft_trainer.pack_dataset = pack
    try:
        yield
    finally:
        sft_trainer.pack_dataset = plain


@contextmanager
def patch_penstock(canaries: Canaries) -> Iterator[None]:
    """Replaces the content of sequences that Penstock's collator packs."""
    import numpy as np

    import penstock.load.assemble as module

    assemble: Any = module
    plain = assemble.packed

    def pack(found: Any, *args: Any, **kwargs: Any) -> Any:
        canaries.packed = True
        ids = [token for length in found.lengths for token in canaries.next(int(length))]
        return plain(found._replace(ids=np.array(ids, dtype=found.ids.dtype)), *args, **kwargs)

    assemble.packed = pack
    try:
        yield
    finally:
        assemble.packed = plain


# ---- shrink ----------------------------------------------------------------------------------------------------------
# Cuts a model to a few layers and batches to a few tokens, so that a probe runs on a CPU in seconds.
#
# The certificate states what was cut. The remaining layers keep their weights. Of each batch, the window around the
# first trained token is kept, with its sequence boundaries.


def shrink_model(root: nn.Module, layers: int) -> str | None:
    """Drops all but the first layers of a loaded model; returns a description, or None if nothing was cut."""
    found = decoder_layers(root)
    before = len(found)
    if before <= layers:
        return None
    del found[layers:]
    shrink_config(model_of(root).config, layers)
    return f"model cut from {before} to {layers} layers"


def shrink_config(config: Any, layers: int) -> None:
    """Sets the number of layers in a model configuration, and cuts its per-layer lists."""
    for part in {id(config): config, id(config.get_text_config()): config.get_text_config()}.values():
        before = getattr(part, "num_hidden_layers", None)
        if before is None or before <= layers:
            continue
        part.num_hidden_layers = layers
        for name, value in list(vars(part).items()):
            if isinstance(value, list) and len(value) == before:
                setattr(part, name, value[:layers])


def shrink_folder(source: Path, target: Path, layers: int) -> str | None:
    """Writes a folder that loads as the model in `source` with its first layers only; returns a description."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    before = config.get("num_hidden_layers")
    target.mkdir(parents=True)
    if isinstance(before, int) and before > layers:
        config["num_hidden_layers"] = layers
        for name, value in config.items():
            if isinstance(value, list) and len(value) == before:
                config[name] = value[:layers]
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in source.iterdir():
        if file.name != "config.json" and file.is_file():
            (target / file.name).symlink_to(file.resolve())
    after = config.get("num_hidden_layers")
    return f"model cut from {before} to {after} layers" if after != before else None


def shorten_rows(inputs: Mapping[str, Any], tokens: int, around: int | None = None) -> dict[str, Any]:
    """Cuts a batch to at most `tokens` columns, centred on the column `around` or on the first trained token."""
    ids = inputs["input_ids"]
    length = ids.shape[1]
    if length <= tokens:
        return dict(inputs)
    if around is None:
        trained = trained_mask(inputs).any(dim=0).nonzero()
        around = int(trained[0]) if len(trained) else 0
    start = min(max(0, around - tokens // 2), length - tokens)
    found: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[1] == length:
            found[name] = value[:, start : start + tokens]
        elif isinstance(value, torch.Tensor) and name.startswith("cu_seq"):
            inner = (value.long() - start).clamp(0, tokens).unique()
            found[name] = inner.to(value.dtype)
        elif name.startswith("max_length") and isinstance(value, int):
            found[name] = min(value, tokens)
        else:
            found[name] = value
    return found


def keep_first_rows(inputs: Mapping[str, Any], rows: int, *, pairs: bool) -> dict[str, Any]:
    """Keeps the first rows of a batch; of pairs (all chosen rows, then all rejected) the first rows of each half."""
    count = inputs["input_ids"].shape[0]
    half = count // 2
    if count <= (2 * rows if pairs else rows):
        return dict(inputs)
    kept = [*range(rows), *range(half, half + rows)] if pairs else list(range(rows))
    return {
        name: value[kept] if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == count else value
        for name, value in inputs.items()
    }


def trained_mask(inputs: Mapping[str, Any]) -> torch.Tensor:
    """The trained positions of a batch: from its labels, else a completion mask, else everything but padding."""
    ids: torch.Tensor = inputs["input_ids"]
    labels = inputs.get("labels")
    if isinstance(labels, torch.Tensor) and labels.shape == ids.shape:
        return labels != -100
    for name in ("completion_mask", "loss_mask", "attention_mask"):
        mask = inputs.get(name)
        if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
            return mask.bool()
    return torch.ones_like(ids, dtype=torch.bool)
