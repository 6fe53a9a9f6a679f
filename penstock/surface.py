"""Methods of datasets, views and mixtures whose work is done to their right in the pipeline.

`ds.view()`, `view.loader()`, `view.export()`: users look for these where they hold the object, but the stages that do
the work import the object's module. This is the one place that looks to the right, and only when a method is called.
`tools.graph` exempts it alone.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datasets

    from penstock.arguments import ExportArguments, LoaderArguments, ViewArguments
    from penstock.build.conversations import ConversationReader as ConversationReader
    from penstock.exchange.export import Exported as Exported
    from penstock.exchange.export import OnExported as OnExported
    from penstock.load.loader import Loader as Loader
    from penstock.load.view import Served
    from penstock.load.view import View as View
    from penstock.look.statistics import Stats as Stats
    from penstock.store.dataset import Dataset


def view(dataset: Dataset, options: ViewArguments) -> View:
    """A view of a dataset."""
    from penstock.load.options import view_options
    from penstock.load.view import open_view

    return open_view(dataset, view_options(options))


def conversations(dataset: Dataset) -> ConversationReader:
    """The reader of a dataset's source rows."""
    from penstock.build.conversations import ConversationReader

    return ConversationReader(dataset)


def loader(served: Served, options: LoaderArguments) -> Loader:
    """A loader of a view or mixture."""
    from penstock.load.loader import Loader

    return Loader(served, **options)


def export(
    served: Served,
    to: str,
    folder: str | os.PathLike[str],
    on_progress: OnExported | None,
    options: ExportArguments,
) -> Exported:
    """A view or mixture in another trainer's format."""
    from penstock.exchange.export import export

    return export(served, to, folder, on_progress, **options)


def to_hf(served: Served, capacity: int | None) -> datasets.Dataset:
    """A view or mixture as a `datasets.Dataset`."""
    from penstock.exchange.tables import lazy_dataset

    return lazy_dataset(served, capacity)


def stats(counted: Dataset | Served, capacity: int | None) -> Stats:
    """Statistics of a dataset, view or mixture."""
    from penstock.look.statistics import stats

    return stats(counted, capacity)


def html(shown: object) -> str | None:
    """What a notebook shows of an example, a batch, a dataset or a view; None: its plain repr."""
    from penstock.look.notebook import html_of

    return html_of(shown)
