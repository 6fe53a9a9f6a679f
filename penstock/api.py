"""The public API: `prepare`, `adopt`, `open_` and `mix`, and the datasets, views and mixtures they return."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Unpack

from penstock.arguments import AdoptArguments, PrepareArguments
from penstock.build.options import PrepareOptions, prepare_options
from penstock.exchange.options import AdoptOptions, WriteOptions, adopt_options
from penstock.load.options import LoaderOptions, ViewOptions
from penstock.load.view import Mixture, Served, View, mix
from penstock.options import with_signature
from penstock.store.dataset import Dataset, open_dataset

if TYPE_CHECKING:
    from penstock.build.estimate import Estimate
    from penstock.build.progress import OnProgress, Progress

__all__ = ["Dataset", "Mixture", "View", "adopt", "estimate", "mix", "open_", "prepare"]

with_signature(ViewOptions)(Dataset.view)
with_signature(ViewOptions)(View.with_options)
with_signature(ViewOptions)(Mixture.with_options)
with_signature(LoaderOptions)(Served.loader)
with_signature(WriteOptions)(Served.export)
open_ = open_dataset


@with_signature(PrepareOptions)
def prepare(
    *sources: Any,
    on_progress: OnProgress | None = None,
    progress: bool | None = None,
    **options: Unpack[PrepareArguments],
) -> Dataset:
    """Render and tokenize conversations once. The dataset is reused as long as the content stays the same.

    Sources are files, folders, globs and hub names, `-` for standard input, or rows: a `datasets.Dataset`, a table
    (pyarrow, pandas, polars), a list or another iterable of dicts. `tokenizer` is a folder, a tokenizer.json, a hub
    name or a transformers tokenizer. `on_progress` is called with a `Progress` after every slice; `progress` turns the
    progress display on or off (None: on in terminals and notebooks).

    All options of `penstock prepare` are keyword arguments (`tokenizer=`, `template=`, `workers=`, …). Unlike the
    command, the function continues with a warning if the cache is not writable: it builds once per host in a temporary
    folder, unless `on_unwritable="error"`.
    """
    from penstock.build.run import Builder  # prepared datasets open without the engines
    from penstock.look.progress import watched

    values, given = _tokenizer_apart({"on_unwritable": "temporary", **options})
    with watched(progress) as watch:

        def on_slice(report: Progress) -> None:
            watch(report)
            if on_progress is not None:
                on_progress(report)

        outcome = Builder(sources, prepare_options(values), on_slice, given).run()
    watch.done(outcome)
    return outcome.dataset


def _tokenizer_apart(options: dict[str, Any]) -> tuple[dict[str, Any], object]:
    """Options with the name of a tokenizer object in place of it, and the object (None for a name or path)."""
    tokenizer = options.get("tokenizer")
    if tokenizer is None or isinstance(tokenizer, str | os.PathLike):
        return options, None
    return {**options, "tokenizer": type(tokenizer).__name__}, tokenizer


@with_signature(PrepareOptions)
def estimate(*sources: Any, nodes: int = 1, **options: Unpack[PrepareArguments]) -> Estimate:
    """Predict what `prepare` would produce and cost, from a sample of the rows. Builds nothing.

    Takes the sources and options of `prepare`. `nodes` is the number of machines like this one to predict the time for.
    """
    from penstock.build.estimate import predict

    values, given = _tokenizer_apart({**options})
    return predict(sources, prepare_options(values), nodes=nodes, tokenizer=given)


@with_signature(AdoptOptions)
def adopt(*sources: str | os.PathLike[str], **options: Unpack[AdoptArguments]) -> Dataset:
    """Create a dataset from rows that are already tokenized. Takes the options of `penstock adopt`."""
    from penstock.exchange.adopt import adopt as run

    return run(sources, adopt_options(options)).dataset
