"""Cut a model to few layers and batches to few tokens, so that a probe runs on a CPU in seconds.

What is cut is said in the certificate. Weights that remain are the model's own. Of a batch the window is kept that
holds the first trained token; sequence boundaries inside it stay where they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.verify.modules import decoder_layers, model_of


def cut_model(root: nn.Module, layers: int) -> str | None:
    """Drop all but the first layers of a loaded model; what was done, in words."""
    found = decoder_layers(root)
    before = len(found)
    if before <= layers:
        return None
    del found[layers:]
    cut_config(model_of(root).config, layers)
    return f"model cut from {before} to {layers} layers"


def cut_config(config: Any, layers: int) -> None:
    """Make a configuration fit so many layers, lists with an entry per layer included."""
    for part in {id(config): config, id(config.get_text_config()): config.get_text_config()}.values():
        before = getattr(part, "num_hidden_layers", None)
        if before is None or before <= layers:
            continue
        part.num_hidden_layers = layers
        for name, value in list(vars(part).items()):
            if isinstance(value, list) and len(value) == before:
                setattr(part, name, value[:layers])


def cut_folder(source: Path, target: Path, layers: int) -> str | None:
    """A folder that loads as the model in `source` with its first layers only; what was done, in words."""
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


def shorten(inputs: Mapping[str, Any], tokens: int, around: int | None = None) -> dict[str, Any]:
    """A batch with at most so many tokens a row, `around` a column or the first trained token."""
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


def fewer_rows(inputs: Mapping[str, Any], rows: int, *, pairs: bool) -> dict[str, Any]:
    """The first rows of a batch; of pairs, which stand as all chosen and then all rejected, the first of each."""
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
    """Where a batch trains: labels, or a mask of completions, or everything that is not padding."""
    ids: torch.Tensor = inputs["input_ids"]
    labels = inputs.get("labels")
    if isinstance(labels, torch.Tensor) and labels.shape == ids.shape:
        return labels != -100
    for name in ("completion_mask", "loss_mask", "attention_mask"):
        mask = inputs.get(name)
        if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
            return mask.bool()
    return torch.ones_like(ids, dtype=torch.bool)
