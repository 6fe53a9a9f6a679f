"""The public API: `prepare`, `adopt`, `open_` and `mix`, and the datasets, views and mixtures they return."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack

from penstock.arguments import (
    AdoptArguments,
    ExportArguments,
    LoaderArguments,
    PrepareArguments,
    ViewArguments,
)
from penstock.build.options import PrepareOptions, prepare_options
from penstock.exchange.options import AdoptOptions, WriteOptions, adopt_options
from penstock.load.loader import Loader
from penstock.load.options import LoaderOptions, ViewOptions, view_options
from penstock.load.view import BaseMixture, BaseView, Count
from penstock.load.view import mix as mix_views
from penstock.notebook import html
from penstock.options import with_signature
from penstock.store.dataset import StoredDataset, open_dataset

if TYPE_CHECKING:
    import datasets

    from penstock.build.conversations import ConversationReader
    from penstock.build.estimate import Estimate
    from penstock.build.progress import OnProgress, Progress
    from penstock.exchange.export import Exported
    from penstock.exchange.export import OnProgress as OnExportProgress
    from penstock.look.statistics import Stats


class View(BaseView):
    """A dataset under a loss policy, a maximum length and a hold-out."""

    def stats(self, capacity: int | None = None) -> Stats:
        """Statistics of the rows this view serves, as printed by `penstock stats` and shown in reports."""
        return _stats(self, capacity)

    def _repr_html_(self) -> str | None:
        return html(self)

    @with_signature(LoaderOptions)
    def loader(self, **options: Unpack[LoaderArguments]) -> Loader:
        """Iterate over batches of this view, prefetched in the background and resumable at any step."""
        return Loader(self, **options)

    @with_signature(WriteOptions)
    def export(
        self,
        to: str,
        folder: str | os.PathLike[str],
        on_progress: OnExportProgress | None = None,
        **options: Unpack[ExportArguments],
    ) -> Exported:
        """Write this view in another trainer's format; a killed export resumes where it stopped."""
        return _export(self, to, folder, on_progress, options)

    def to_hf(self, *, capacity: int | None = None) -> datasets.Dataset:
        """A `datasets.Dataset` over the mapped shards: it stores row numbers and reads rows on access."""
        return _to_hf(self, capacity)


class Mixture(BaseMixture):
    """Several views combined, with a share of each per epoch."""

    def stats(self, capacity: int | None = None) -> Stats:
        """Statistics of the rows that its members serve, each member counted once, whatever its passes."""
        return _stats(self, capacity)

    def _repr_html_(self) -> str | None:
        return html(self)

    @with_signature(LoaderOptions)
    def loader(self, **options: Unpack[LoaderArguments]) -> Loader:
        """Iterate over batches of this mixture, prefetched in the background and resumable at any step."""
        return Loader(self, **options)

    @with_signature(WriteOptions)
    def export(
        self,
        to: str,
        folder: str | os.PathLike[str],
        on_progress: OnExportProgress | None = None,
        **options: Unpack[ExportArguments],
    ) -> Exported:
        """Write an epoch of this mixture in another trainer's format; a killed export resumes where it stopped."""
        return _export(self, to, folder, on_progress, options)

    def to_hf(self, *, capacity: int | None = None) -> datasets.Dataset:
        """A `datasets.Dataset` over the mapped shards: it stores row numbers and reads rows on access."""
        return _to_hf(self, capacity)


def _stats(counted: View | Mixture | Dataset, capacity: int | None) -> Stats:
    from penstock.look.statistics import stats

    return stats(counted, capacity)


def _export(
    served: View | Mixture,
    to: str,
    folder: str | os.PathLike[str],
    on_progress: OnExportProgress | None,
    options: ExportArguments,
) -> Exported:
    from penstock.exchange.export import export  # imports pyarrow's writers, which training doesn't need

    return export(served, to, folder, on_progress, **options)


def _to_hf(served: View | Mixture, capacity: int | None) -> datasets.Dataset:
    from penstock.exchange.tables import lazy_dataset

    return lazy_dataset(served, capacity)


class Dataset(StoredDataset):
    """A prepared dataset. Call `view` to get examples with loss masks."""

    @with_signature(ViewOptions)
    def view(self, **options: Unpack[ViewArguments]) -> View:
        """Apply a loss policy, a maximum length and a hold-out, without encoding anything again."""
        return View(self, view_options(options)).filled()

    def stats(self, capacity: int | None = None) -> Stats:
        """Statistics of all rows, with the trained tokens of the default view."""
        return _stats(self, capacity)

    def _repr_html_(self) -> str | None:
        return html(self)

    def conversation(self, index: int) -> dict[str, Any]:
        """The conversation that example (or pair) `index` was rendered from, reread from its source.

        Returns `messages`, `tools` and template `variables` in the form that transformers' `apply_chat_template`
        takes (`text` for rows without a template); for pairs, one such dictionary each for `chosen` and `rejected`.
        """
        return self.origin.conversation(index)

    @cached_property
    def origin(self) -> ConversationReader:
        """Reads the source rows of examples."""
        from penstock.build.conversations import ConversationReader  # imports the template engines

        return ConversationReader(self)

    def __reduce__(self) -> tuple[Callable[..., Dataset], tuple[str, None, str | None]]:
        return open_, (self.address, None, self.cache.place.local)


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
    return Dataset(outcome.dataset.cache, outcome.dataset.manifest)


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

    dataset = run(sources, adopt_options(options)).dataset
    return Dataset(dataset.cache, dataset.manifest)


def open_(
    where: str | os.PathLike[str],
    cache: str | os.PathLike[str] | None = None,
    local_cache: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Open a prepared dataset by its folder or URL, or by its key (or a prefix of it) in a cache.

    From a cache in an object store, shards are downloaded to `local_cache` when they are needed.
    """
    stored = open_dataset(where, cache, local_cache)
    return Dataset(stored.cache, stored.manifest)


def mix(parts: Mapping[str, tuple[Dataset | View, float | Count]], seed: int = 0) -> Mixture:
    """Mix datasets or views: `{"chat": (chat, 1.0), "tools": (tools, 0.3), "extra": (extra, Count(500))}`.

    A number means passes per epoch (0.3 is a different 30% each epoch); `Count` means examples per epoch.
    """
    mixed = mix_views(parts, seed)
    return Mixture(mixed.shares, mixed.seed)
