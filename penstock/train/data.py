"""Prepares the configured sources and opens them as views or mixtures to train and evaluate on.

All ranks call this: the build shares the work through the cache and needs no collectives. Each source is prepared and
cached separately, so changing a weight, the loss policy or the maximum length doesn't re-encode anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.build.auto_check import auto_model
from penstock.build.options import prepare_options
from penstock.build.progress import OnProgress
from penstock.build.run import Builder
from penstock.digests import bytes_digest
from penstock.errors import UsageError
from penstock.load.options import HoldoutSide, ViewOptions
from penstock.load.view import Count, Served, mix, open_view
from penstock.prepare.modes import TokenizerAs
from penstock.prepare.tokenizer.files import load_tokenizer
from penstock.store.dataset import Dataset, open_dataset
from penstock.train.config import ModelConfig, SourceConfig, TrainConfig

OnStatus = Callable[[str], None]


class Data(NamedTuple):
    """Views or mixtures to train and evaluate on."""

    train: Served
    held_out: Served | None


def open_data(config: TrainConfig, on_progress: OnProgress | None = None, on_status: OnStatus = lambda _: None) -> Data:
    """Opens the sources of a run, preparing those that are not cached."""
    sources = _prepared(config.data.sources, config, "data.sources", on_progress, on_status)
    view = config.view
    if view.holdout is None:
        held_out = _prepared(config.eval.sources, config, "eval.sources", on_progress, on_status)
        evaluated = _served(config.eval.sources, held_out, view, config.seed) if held_out else None
        return Data(_served(config.data.sources, sources, view, config.seed), evaluated)
    train = _served(config.data.sources, sources, view, config.seed)
    once = [SourceConfig(path=source.path, name=source.name) for source in config.data.sources]
    return Data(train, _served(once, sources, replace(view, holdout_side=HoldoutSide.HELD_OUT), config.seed))


def tokenizer_of(model: ModelConfig) -> str:
    """The configured tokenizer, else the model's own."""
    if model.tokenizer is not None:
        return model.tokenizer
    if model.path is not None:
        return model.path
    if model.init is not None:
        folder = model.init if model.init.is_dir() else model.init.parent
        if (folder / "tokenizer.json").is_file():
            return str(folder)
    raise UsageError("no tokenizer: set model.tokenizer to a folder or a hub name.")


def _prepared(
    sources: Sequence[SourceConfig],
    config: TrainConfig,
    section: str,
    on_progress: OnProgress | None,
    on_status: OnStatus,
) -> list[Dataset]:
    found = []
    for number, source in enumerate(sources):
        try:
            on_status(f"data: {', '.join(source.path)}")
            dataset, hit = _dataset(source, config, on_progress)
            how = "found in the cache" if hit else "prepared"
            on_status(f"data: {len(dataset):,} rows, {dataset.tokens:,} tokens, {how}")
            found.append(dataset)
        except UsageError as error:
            raise UsageError(f"{section}.{number}: {error}") from error
    return found


def _dataset(source: SourceConfig, config: TrainConfig, on_progress: OnProgress | None) -> tuple[Dataset, bool]:
    """A source's dataset, and whether it was there already."""
    if not source.path:
        raise UsageError("no path. Set it to a file, a glob, a folder, a hub dataset or a prepared dataset.")
    tokenizer = tokenizer_of(config.model)
    first = Path(source.path[0]).expanduser()
    if len(source.path) == 1 and (first / "manifest.json").is_file():
        return _opened(first, tokenizer, config.model.revision), True
    options: Mapping[str, Any] = {**config.data.prepare, **source.prepare}
    options = {"tokenizer": tokenizer, "tokenizer_revision": _revision(config.model), **options}
    if options["tokenizer"] != tokenizer:
        raise UsageError(f"prepare.tokenizer={options['tokenizer']!r} differs from the model's. Set model.tokenizer.")
    chosen = prepare_options({name: value for name, value in options.items() if value is not None})
    outcome = Builder(list(source.path), chosen, on_progress).run()
    return outcome.dataset, outcome.hit


def _revision(model: ModelConfig) -> str | None:
    """The tokenizer's revision: the model's, unless the tokenizer is configured separately."""
    return model.revision if model.tokenizer is None else None


def _opened(path: Path, tokenizer: str, revision: str | None) -> Dataset:
    dataset = open_dataset(path)
    by_auto = dataset.recipe.get("tokenizer_as") == TokenizerAs.AUTO
    model = load_tokenizer(tokenizer, revision=revision, for_auto=by_auto)
    if by_auto:
        model = auto_model(dataset.cache, model)
    if dataset.recipe["tokenizer"] != bytes_digest(model.tokenizer_json):
        how = " (as AutoTokenizer loads it)" if by_auto else ""
        raise UsageError(
            f"{path}: prepared with a different tokenizer than {tokenizer}{how}. Prepare the sources with that one."
        )
    return dataset


def _served(sources: Sequence[SourceConfig], datasets: Sequence[Dataset], options: ViewOptions, seed: int) -> Served:
    """A view, or a mixture if there are several sources or a source's weight is not 1."""
    views = [open_view(dataset, options) for dataset in datasets]
    amounts = [_amount(source) for source in sources]
    if len(views) == 1 and amounts[0] == 1.0:
        return views[0]
    names = _names(sources)
    return mix({name: (view, amount) for name, view, amount in zip(names, views, amounts, strict=True)}, seed)


def _amount(source: SourceConfig) -> float | Count:
    if source.examples is not None:
        if source.weight is not None:
            raise UsageError(f"source {source.path[0]!r}: weight and examples are mutually exclusive. Set one of them.")
        return Count(source.examples)
    return 1.0 if source.weight is None else source.weight


def _names(sources: Sequence[SourceConfig]) -> list[str]:
    """The name of each source: configured, else that of its file, numbered if not unique."""
    names: list[str] = []
    for source in sources:
        base = source.name or Path(source.path[0]).name.split(".")[0] or "source"
        if source.name is not None and source.name in names:
            raise UsageError(f"two sources are named {source.name!r}. Give them different names.")
        number, name = 2, base
        while name in names:
            name, number = f"{base}-{number}", number + 1
        names.append(name)
    return names


def has_fractional_weights(served: Served) -> bool:
    """Whether any message has a loss weight other than 0 and 1."""
    for view in served.views:
        for shard in range(len(view.dataset.shards.examples)):
            weights = view.dataset.shards.structure(shard).segment_weights
            if weights is not None and bool(((weights != 0) & (weights != 1) & ~np.isnan(weights)).any()):
                return True
    return False


def source_rows(served: Served, items: Sequence[int]) -> list[str]:
    """The source file and row (from 0) of each item, for messages."""
    found = []
    for item in items:
        member, _ = served.place(int(item))
        found.append("{} row {}".format(*served.members[member].view.dataset.file_row(*served[int(item)].row)))
    return found
