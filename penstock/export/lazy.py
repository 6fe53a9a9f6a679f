"""A view as a `datasets.Dataset` that copies nothing: it holds row numbers and reads the mapped shards when asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import UsageError
from penstock.export.rows import ExportRows
from penstock.export.tables import plain_columns
from penstock.view.mixture import Mixture
from penstock.view.view import View

if TYPE_CHECKING:
    import datasets


def lazy_dataset(served: View | Mixture, capacity: int | None = None) -> datasets.Dataset:
    """Rows with the columns of `--to hf`; trainers need `remove_unused_columns=False` with it."""
    try:
        import datasets
    except ImportError:
        raise UsageError(
            "a datasets.Dataset needs the package datasets. Install it: pip install 'penstock[hub]'."
        ) from None
    rows = ExportRows(served, capacity=capacity)
    numbers = datasets.Dataset.from_dict({"row": np.arange(len(rows))})
    return numbers.with_transform(_Reader(served, capacity))


class _Reader:
    """Columns for a batch of row numbers; pickles as the view it reads."""

    def __init__(self, served: View | Mixture, capacity: int | None) -> None:
        self._arguments = served, capacity
        self._rows = ExportRows(served, capacity=capacity)

    def __call__(self, batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        blocks = [next(self._rows.blocks(row, row + 1)) for row in batch["row"]]
        columns = [plain_columns(block, self._rows) for block in blocks]
        return {name: [found[name][0].values.to_numpy() for found in columns] for name in columns[0]}

    def __reduce__(self) -> tuple[type[_Reader], tuple[View | Mixture, int | None]]:
        return _Reader, self._arguments
